/** The JupyterLab extension's plugins: each is a file of its own, and each can be switched off by itself. */
import type { JupyterFrontEndPlugin } from '@jupyterlab/application';

import { panel } from './plugins/panel';

const plugins: JupyterFrontEndPlugin<any>[] = [panel];

export default plugins;
