import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';

import { IMachine, Machine } from '../machine';
import { IWatch } from '../watch';
import type { Watch } from '../watch';

/** Asks the Jupyter server for the engines and GPUs of its machine; switched off, the panel shows what kernels tell. */
export const machine: JupyterFrontEndPlugin<Machine> = {
  id: 'nnsight-lab:machine',
  description: 'Asks the Jupyter server for the engines and GPUs of its machine.',
  autoStart: true,
  provides: IMachine,
  requires: [IWatch],
  activate: (app: JupyterFrontEnd, watch: Watch) => {
    const found = new Machine(app.serviceManager.serverSettings);
    let before = '';
    watch.changed.connect(() => {
      // A kernel that came, went, or answers no longer; an engine that it has or no longer has.
      const engines = (link: Watch['all'][number]['link']) => (link.status?.engines ?? []).map(engine => `${engine.log} ${engine.pids.length}`);
      const now = watch.all.map(({ link }) => `${link.id} ${link.presence} ${link.silent} ${engines(link)}`).join();
      if (now !== before) {
        before = now;
        found.stir();
      }
    });
    return found;
  }
};
