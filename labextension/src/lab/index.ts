/** The JupyterLab extension's plugins: each is a file of its own, and each can be switched off by itself. */
import type { JupyterFrontEndPlugin } from '@jupyterlab/application';

import { badges } from './plugins/badges';
import { cells } from './plugins/cells';
import { forecast } from './plugins/forecast';
import { lsp } from './plugins/lsp';
import { machine } from './plugins/machine';
import { panel } from './plugins/panel';
import { statusbar } from './plugins/statusbar';
import { watch } from './plugins/watch';

const plugins: JupyterFrontEndPlugin<any>[] = [watch, machine, panel, statusbar, cells, badges, forecast, lsp];

export default plugins;
