/** Opens something beside the notebook: a tab in JupyterLab, the area below in Notebook 7. */
import type { ILabShell, JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget } from '@jupyterlab/apputils';
import type { Widget } from '@lumino/widgets';
import { TabPanel } from '@lumino/widgets';

let opened = 0;

/** Notebook 7 has one document and no tabs: it drops what is added beside it, without a word, and shows this below. */
export function openBeside(app: JupyterFrontEnd, lab: ILabShell | null, content: Widget, mode: 'split-bottom' | 'split-right'): void {
  const widget = new MainAreaWidget({ content });
  widget.id = `nnsight-lab-${content.title.label}-${(opened += 1)}`;
  widget.title.closable = true;
  widget.toggleClass('nnlab-down', !lab);
  app.shell.add(widget, lab ? 'main' : 'down', { mode });
  app.shell.activateById(widget.id);
  const tabs = widget.parent?.parent;
  if (!lab && tabs instanceof TabPanel) {
    tabs.currentWidget = widget;
  }
}
