/** Cells and the edits they left: found by the cell's id, and stale where the cell is no longer what was run. */
import type { Cell } from '@jupyterlab/cells';
import type { NotebookPanel } from '@jupyterlab/notebook';

import type { PanelEdit } from './wire';

export function cellOf(panel: NotebookPanel, id: string): Cell | null {
  return panel.isDisposed ? null : (panel.content.widgets.find(cell => cell.model.id === id) ?? null);
}

/** How an edit stands to its cell. */
export function editOf(panel: NotebookPanel, edit: PanelEdit): 'no-cell' | 'active' | 'stale' {
  const cell = edit.cell_id ? cellOf(panel, edit.cell_id) : null;
  if (!cell) {
    return 'no-cell';
  }
  return cell.model.sharedModel.getSource().trimEnd() === edit.cell_source.trimEnd() ? 'active' : 'stale';
}

/** Show a cell and make it the active one. */
export async function revealCell(panel: NotebookPanel, id: string): Promise<void> {
  const index = panel.isDisposed ? -1 : panel.content.widgets.findIndex(cell => cell.model.id === id);
  if (index >= 0) {
    panel.content.activeCellIndex = index;
    await panel.content.scrollToItem(index, 'smart');
    panel.content.activate();
  }
}

const HEADER = /^\s*%%(trace|edit)(?=\s|$)[^\n]*\n?/;

/** A cell's source as a trace, an edit, or plain. */
export function turned(source: string, into: 'trace' | 'edit' | 'plain', name: string): string {
  const body = source.replace(HEADER, '');
  if (into === 'plain') {
    return body;
  }
  const header = into === 'edit' ? `%%edit ${name}` : '%%trace "The Eiffel Tower is in the city of", max_tokens=1';
  return `${header}\n${body.trim() ? body : 'pass'}`;
}
