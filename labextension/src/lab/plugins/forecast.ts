import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import type { Cell } from '@jupyterlab/cells';
import { INotebookTracker } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { element, say } from '../../widgets/dom';
import type { Watch } from '../watch';
import { IWatch } from '../watch';
import type { PanelForecast } from '../wire';
import * as wire from '../wire';
import { bytes, DOMAIN } from '../words';

const CLASS = 'nnlab-forecast';
const OURS = /^(?:\s*(?:#.*|%%(?:time|capture)\b.*)?\n)*%%(?:trace|edit)(?=\s|$)/;
/** A pause in typing. */
const PAUSE_MS = 400;

/** What the active cell will save, said on it before it runs. */
export const forecast: JupyterFrontEndPlugin<void> = {
  id: 'nnsight-lab:forecast',
  description: 'Says on the active %%trace or %%edit cell how much it will save.',
  autoStart: true,
  requires: [IWatch, INotebookTracker],
  optional: [ITranslator],
  activate: (_: JupyterFrontEnd, watch: Watch, tracker: INotebookTracker, translator: ITranslator | null) => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    let timer = 0;
    let told = '';
    let shown: HTMLElement | null = null;
    let listened: Cell | null = null;

    const clear = () => {
      shown?.remove();
      shown = null;
      told = '';
    };
    const ask = async () => {
      const cell = tracker.activeCell;
      const source = cell?.model.type === 'code' ? cell.model.sharedModel.getSource() : '';
      const link = watch.current?.link;
      const area = cell?.inputArea?.editorWidget.node;
      if (!cell || !area || !link || link.presence !== 'loaded' || !OURS.test(source)) {
        clear();
        return;
      }
      const key = JSON.stringify([
        cell.model.id,
        source,
        link.id,
        // The requests run edits too, and which is the current engine may have changed.
        link.status?.engines.map(engine => [engine.name, engine.current, engine.up_s > 0, engine.edits.map(edit => [edit.name, edit.version, edit.on])])
      ]);
      // A question makes a busy kernel look idle, and a cell that waits for one can wait for this too.
      if (key === told || link.kernel.status === 'busy') {
        return;
      }
      told = key;
      const answer = await link.question(wire.FORECAST, { [wire.CELL]: source });
      if (key !== told) {
        return;
      }
      const found = answer.ok ? answer.forecast : null;
      if (!found) {
        shown?.remove();
        shown = null;
        return;
      }
      if (shown?.parentElement !== area) {
        shown?.remove();
        shown = element('div', { class: CLASS, role: 'note' });
        area.append(shown);
      }
      say(shown, words(found, trans));
      shown.title = trans.__('Read from the cell’s text; nothing was run. “estimate=True” in its first line measures it.');
    };
    const later = () => {
      window.clearTimeout(timer);
      timer = window.setTimeout(() => void ask(), PAUSE_MS);
    };
    const activeChanged = () => {
      if (listened && !listened.isDisposed) {
        listened.model.contentChanged.disconnect(later);
      }
      clear();
      listened = tracker.activeCell;
      listened?.model.contentChanged.connect(later);
      later();
    };
    tracker.activeCellChanged.connect(activeChanged);
    tracker.currentChanged.connect(activeChanged);
    watch.changed.connect(later);
  }
};

/** "will run 3 saves, about 2.1 MB" */
export function words(found: PanelForecast, trans: TranslationBundle): string {
  const bound = found.at_least ? trans.__('at least ') : found.at_most ? trans.__('up to ') : '';
  const saves = bound + trans._n('%1 save', '%1 saves', found.saves);
  let size = '';
  if (found.bytes >= 0 && found.saves > 0) {
    if (found.token_bytes > 0) {
      size = trans.__(', about %1 a prompt token', bytes(found.token_bytes, trans));
    } else {
      size = trans.__(', about %1', bytes(found.bytes, trans));
    }
  }
  if (found.requests === 0) {
    return found.each_step
      ? trans.__('will run %1 for each token of a request%2', saves, size)
      : trans.__('will run %1 for each request%2', saves, size);
  }
  const edits = found.of_edits > 0 ? trans.__(' (%1 of edits)', found.of_edits) : '';
  return trans.__('will run %1%2%3', saves, edits, size);
}
