/** Which edits a notebook has chosen as its defaults: kept in the notebook, so that they are offered to its next kernel. */
import type { NotebookPanel } from '@jupyterlab/notebook';

import type { PanelEngine } from './wire';

/** The notebook's metadata under this name is ours. */
const KEY = 'nnsight_lab';
const FIELD = 'default_edits';

function kept(panel: NotebookPanel): Record<string, unknown> {
  const found = panel.isDisposed ? null : panel.model?.getMetadata(KEY);
  return found && typeof found === 'object' && !Array.isArray(found) ? (found as Record<string, unknown>) : {};
}

function choices(panel: NotebookPanel): Record<string, unknown> {
  const found = kept(panel)[FIELD];
  return found && typeof found === 'object' && !Array.isArray(found) ? (found as Record<string, unknown>) : {};
}

/** What the notebook chose for an engine; null where it chose nothing. */
export function remembered(panel: NotebookPanel, engine: string): string[] | null {
  const found = choices(panel)[engine];
  return Array.isArray(found) && found.every(name => typeof name === 'string') ? (found as string[]) : null;
}

/** Keep a choice in the notebook, or take it out. */
export function remember(panel: NotebookPanel, engine: string, names: readonly string[] | null): void {
  if (panel.isDisposed || !panel.model || JSON.stringify(remembered(panel, engine)) === JSON.stringify(names)) {
    return;
  }
  const { [engine]: _, ...others } = choices(panel);
  const chosen = names === null ? others : { ...others, [engine]: [...names] };
  const { [FIELD]: __, ...rest } = kept(panel);
  const all = Object.keys(chosen).length ? { ...rest, [FIELD]: chosen } : rest;
  if (Object.keys(all).length) {
    panel.model.setMetadata(KEY, all);
  } else {
    panel.model.deleteMetadata(KEY);
  }
}

/** Follow what the kernel says: a choice made by a line of a cell is kept as well as one made in the panel. */
export class Mirror {
  #chose = new Map<string, boolean>();

  follow(panel: NotebookPanel, link: string, engine: PanelEngine): void {
    const key = `${link} ${engine.name}`;
    if (engine.chooses_edits) {
      remember(panel, engine.name, engine.default_edits);
    } else if (this.#chose.get(key)) {
      // It was taken back; a kernel that never had one is only asked whether it wants it.
      remember(panel, engine.name, null);
    }
    this.#chose.set(key, engine.chooses_edits);
  }
}
