import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { Widget } from '@lumino/widgets';

export const panel: JupyterFrontEndPlugin<void> = {
  id: 'nnsight-lab:panel',
  description: 'The side panel with engines, edits and saves.',
  autoStart: true,
  activate: (app: JupyterFrontEnd) => {
    const widget = new Widget();
    widget.id = 'nnsight-lab-panel';
    widget.title.caption = 'nnsight engines';
    app.shell.add(widget, 'left', { rank: 500 });
  }
};
