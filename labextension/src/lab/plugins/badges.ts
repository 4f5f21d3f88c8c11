import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { element, say } from '../../widgets/dom';
import { cellOf, editOf } from '../cells';
import { Mirror } from '../defaults';
import type { Watch } from '../watch';
import { IWatch } from '../watch';
import { DOMAIN } from '../words';

const CLASS = 'nnlab-badge';

/** A mark on the cell whose edit is on the engine; "stale" where the cell was changed since. */
export const badges: JupyterFrontEndPlugin<void> = {
  id: 'nnsight-lab:badges',
  description: 'Marks the cells whose edits are on an engine.',
  autoStart: true,
  requires: [IWatch, INotebookTracker],
  optional: [ITranslator, ISettingRegistry],
  activate: (
    _: JupyterFrontEnd,
    watch: Watch,
    tracker: INotebookTracker,
    translator: ITranslator | null,
    registry: ISettingRegistry | null
  ) => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    let shown = true;
    const mirror = new Mirror();
    const draw = (panel: NotebookPanel) => {
      if (panel.isDisposed) {
        return;
      }
      const wanted = new Map<HTMLElement, { text: string; stale: boolean; off: boolean }>();
      const link = watch.linkOf(panel);
      for (const engine of link?.status?.engines ?? []) {
        mirror.follow(panel, link?.id ?? '', engine);
        if (!shown) {
          continue;
        }
        for (const edit of engine.edits) {
          const standing = editOf(panel, edit);
          const area = standing === 'no-cell' ? null : cellOf(panel, edit.cell_id)?.inputArea?.editorWidget.node;
          if (area) {
            const how = standing === 'stale' ? trans.__('stale: run the cell again') : edit.on ? trans.__('on') : trans.__('off');
            wanted.set(area, { text: trans.__('%1 v%2 · %3', edit.name, edit.version, how), stale: standing === 'stale', off: !edit.on });
          }
        }
      }
      for (const old of panel.content.node.querySelectorAll<HTMLElement>(`.${CLASS}`)) {
        if (!wanted.has(old.parentElement!)) {
          old.remove();
        }
      }
      for (const [area, { text, stale, off }] of wanted) {
        let badge = area.querySelector<HTMLElement>(`:scope > .${CLASS}`);
        if (!badge) {
          badge = element('div', { class: CLASS, role: 'note' });
          area.append(badge);
        }
        say(badge, text);
        badge.setAttribute('aria-label', trans.__('Edit on the engine: %1', text));
        badge.classList.toggle('nnlab-mod-stale', stale);
        badge.classList.toggle('nnlab-mod-off', off && !stale);
      }
    };
    const drawAll = () => tracker.forEach(draw);
    watch.changed.connect(drawAll);
    void registry?.load(badges.id).then(settings => {
      const read = () => {
        shown = settings.get('show').composite as boolean;
        drawAll();
      };
      settings.changed.connect(read);
      read();
    });
    const watched = (panel: NotebookPanel) => {
      const changed = () => draw(panel);
      panel.model?.contentChanged.connect(changed);
      panel.disposed.connect(() => panel.model?.contentChanged.disconnect(changed));
    };
    tracker.widgetAdded.connect((_, panel) => void panel.context.ready.then(() => watched(panel)));
    tracker.forEach(panel => void panel.context.ready.then(() => watched(panel)));
  }
};
