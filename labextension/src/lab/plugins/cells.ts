import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { Menu } from '@lumino/widgets';

import { turned } from '../cells';
import type { Watch } from '../watch';
import { IWatch } from '../watch';
import { DOMAIN } from '../words';
import { icon } from './panel';

const FORMS = ['trace', 'edit', 'plain'] as const;

/** A toolbar button and commands that make a cell a `%%trace`, a `%%edit`, or plain again. */
export const cells: JupyterFrontEndPlugin<void> = {
  id: 'nnsight-lab:cells',
  description: 'Turns a cell into %%trace or %%edit, by the toolbar, the palette or the keyboard.',
  autoStart: true,
  requires: [IWatch, INotebookTracker],
  optional: [ITranslator, ICommandPalette],
  activate: (
    app: JupyterFrontEnd,
    watch: Watch,
    tracker: INotebookTracker,
    translator: ITranslator | null,
    palette: ICommandPalette | null
  ) => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const labels = {
      trace: trans.__('Run this cell inside a request (%1)', '%%trace'),
      edit: trans.__('Leave this cell on the engine (%1)', '%%edit'),
      plain: trans.__('Make this a plain cell')
    };
    const active = () => {
      const cell = tracker.activeCell;
      return cell && cell.model.type === 'code' ? cell : null;
    };
    const freeName = () => {
      const edits = watch.current?.link.status?.engines.flatMap(engine => engine.edits.map(edit => edit.name)) ?? [];
      let name = 'probe';
      for (let number = 2; edits.includes(name); number++) {
        name = `probe${number}`;
      }
      return name;
    };
    for (const form of FORMS) {
      const id = `nnsight-lab:to-${form}`;
      app.commands.addCommand(id, {
        label: labels[form],
        isEnabled: () => active() !== null,
        describedBy: { args: { type: 'object', properties: {} } },
        execute: () => {
          const cell = active();
          if (cell) {
            const shared = cell.model.sharedModel;
            shared.setSource(turned(shared.getSource(), form, freeName()));
            cell.editor?.focus();
          }
        }
      });
      palette?.addItem({ command: id, category: trans.__('nnsight-lab') });
    }
    // The notebook's toolbar has it from this plugin's settings, where it can be moved or taken off.
    app.commands.addCommand('nnsight-lab:turn', {
      label: '',
      caption: trans.__('Turn the cell into %1 or %2', '%%trace', '%%edit'),
      icon,
      describedBy: { args: { type: 'object', properties: {} } },
      execute: () => {
        const menu = new Menu({ commands: app.commands });
        FORMS.forEach(form => menu.addItem({ command: `nnsight-lab:to-${form}` }));
        const item = tracker.currentWidget?.toolbar.node.querySelector("[data-jp-item-name='nnsight-lab']");
        const box = item?.getBoundingClientRect();
        const opener = document.activeElement;
        menu.aboutToClose.connect(() =>
          requestAnimationFrame(() => {
            menu.dispose();
            // Nothing was chosen: the keyboard is back where it was.
            if (document.activeElement === document.body && opener instanceof HTMLElement) {
              opener.focus();
            }
          })
        );
        menu.open(box?.left ?? 0, box?.bottom ?? 0);
      }
    });
  }
};
