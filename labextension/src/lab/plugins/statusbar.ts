import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

import { element, say } from '../../widgets/dom';
import type { Watch } from '../watch';
import { IWatch } from '../watch';
import * as wire from '../wire';
import { bytes, DOMAIN, state } from '../words';

/** State, tokens per second and saves of the engine in front; opens the panel. Notebook 7 has no status bar. */
export const statusbar: JupyterFrontEndPlugin<void> = {
  id: 'nnsight-lab:statusbar',
  description: 'The engine of the notebook in front, in the status bar.',
  autoStart: true,
  requires: [IWatch],
  optional: [IStatusBar, ITranslator],
  activate: (app: JupyterFrontEnd, watch: Watch, bar: IStatusBar | null, translator: ITranslator | null) => {
    if (!bar) {
      return;
    }
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const text = element('button', { type: 'button', class: 'nnlab-statusbar' });
    text.addEventListener('click', () => void app.commands.execute('nnsight-lab:show'));
    const item = new Widget();
    item.node.append(text);
    const engine = () => {
      const engines = watch.current?.link.status?.engines ?? [];
      return engines.find(other => other.current) ?? engines[0];
    };
    const changed = () => {
      const found = engine();
      if (found) {
        const rate = found.state === wire.BUSY ? trans.__(' · %1 tokens/s', Math.round(found.tokens_per_s)) : '';
        const saves = found.saves_bytes ? trans.__(' · %1 saved', bytes(found.saves_bytes, trans)) : '';
        say(text, trans.__('%1: %2', found.name, state(found.state, trans)) + rate + saves);
        text.title = trans.__('Show the engine panel');
      }
      // What is shown must be true, also while the panel is closed.
      watch.look('statusbar', found !== undefined && found.state !== wire.STOPPED);
    };
    watch.changed.connect(changed);
    bar.registerStatusItem('nnsight-lab:engine', {
      item,
      align: 'left',
      rank: 50,
      isActive: () => engine() !== undefined,
      activeStateChanged: watch.changed as never
    });
  }
};
