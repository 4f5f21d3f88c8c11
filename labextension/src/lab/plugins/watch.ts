import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';

import { IWatch, Watch } from '../watch';

/** Watches the kernels of all open notebooks; other plugins show what it finds. */
export const watch: JupyterFrontEndPlugin<Watch> = {
  id: 'nnsight-lab:watch',
  description: 'Asks the kernels of open notebooks for their engines, edits and saves.',
  autoStart: true,
  provides: IWatch,
  requires: [INotebookTracker],
  optional: [ISettingRegistry],
  activate: (_: JupyterFrontEnd, tracker: INotebookTracker, registry: ISettingRegistry | null) => {
    const found = new Watch(tracker);
    void registry?.load(watch.id).then(settings => {
      const read = () => {
        found.pollSeconds = settings.get('pollSeconds').composite as number;
      };
      settings.changed.connect(read);
      read();
    });
    return found;
  }
};
