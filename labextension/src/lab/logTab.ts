/** A tab with the end of an engine's log, read again at a press. */
import type { ILabShell, JupyterFrontEnd } from '@jupyterlab/application';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { LabIcon } from '@jupyterlab/ui-components';
import { Widget } from '@lumino/widgets';

import { element } from '../widgets/dom';
import { openBeside } from './beside';
import { button } from './keyed';

export function openLog(
  app: JupyterFrontEnd,
  lab: ILabShell | null,
  trans: TranslationBundle,
  icon: LabIcon,
  name: string,
  text: () => Promise<string>
): void {
  const shown = element('pre', { class: 'nnlab-log', tabindex: '0', role: 'group', 'aria-label': trans.__('Log of engine %1', name) });
  const read = async () => {
    shown.textContent = await text();
    shown.scrollTop = shown.scrollHeight;
  };
  const content = new Widget();
  content.addClass('nnlab-log-view');
  content.title.label = trans.__('Log: %1', name);
  content.title.icon = icon;
  content.node.append(element('div', { class: 'nnlab-actions' }, button(trans.__('Read again'), () => void read())), shown);
  openBeside(app, lab, content, 'split-bottom');
  void read();
}
