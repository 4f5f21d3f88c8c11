import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILabShell, ILayoutRestorer } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { IEditorLanguageRegistry } from '@jupyterlab/codemirror';
import { OutputAreaModel, SimplifiedOutputArea } from '@jupyterlab/outputarea';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { LabIcon } from '@jupyterlab/ui-components';
import { Panel } from '@lumino/widgets';

import { openBeside } from '../beside';
import { Defaults } from '../startDefaults';
import { openLog } from '../logTab';
import { IMachine } from '../machine';
import type { Machine } from '../machine';
import '../style.css';
import type { Context } from '../views/context';
import { act } from '../views/context';
import { EnginePanel } from '../views/panel';
import type { Watch } from '../watch';
import { IWatch } from '../watch';
import * as wire from '../wire';
import { DOMAIN } from '../words';

export const icon = new LabIcon({
  name: 'nnsight-lab:engine',
  svgstr:
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" width="16"><g class="jp-icon3" fill="#616161"><path d="M3 4h18v4H3zm0 6h18v4H3zm0 6h18v4H3zm2-11v2h2V5zm0 6v2h2v-2zm0 6v2h2v-2z" fill-rule="evenodd"/></g></svg>'
});

/** The side panel, and the commands that do what its buttons do; in JupyterLab, and in Notebook 7's shell. */
export const panel: JupyterFrontEndPlugin<void> = {
  id: 'nnsight-lab:panel',
  description: 'The side panel with engines, edits and saves, and its commands.',
  autoStart: true,
  requires: [IWatch],
  optional: [
    ITranslator,
    ICommandPalette,
    ILayoutRestorer,
    IEditorLanguageRegistry,
    ILabShell,
    ISettingRegistry,
    IMachine
  ],
  activate: (
    app: JupyterFrontEnd,
    watch: Watch,
    translator: ITranslator | null,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null,
    languages: IEditorLanguageRegistry | null,
    lab: ILabShell | null,
    registry: ISettingRegistry | null,
    machine: Machine | null
  ) => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const defaults = new Defaults();
    void registry?.load(panel.id).then(settings => defaults.follow(settings));
    const context: Context = { app, watch, trans, languages, defaults, machine, announce: text => side.announce(text) };
    const side = new EnginePanel(context);
    side.title.icon = icon;
    app.shell.add(side, 'left', { rank: 500, type: 'nnsight-lab' });
    restorer?.add(side, side.id);

    const front = () => (watch.current?.link.status?.engines.length ? watch.current : null);
    const nameOf = (args: { engine?: unknown }) =>
      typeof args.engine === 'string' ? args.engine : (watch.current?.link.status?.engines.find(engine => engine.current)?.name ?? '');
    const command = (id: string, label: string, execute: (args: { engine?: unknown }) => unknown, enabled: () => boolean) => {
      app.commands.addCommand(id, {
        label,
        caption: label,
        execute,
        isEnabled: enabled,
        describedBy: { args: { type: 'object', properties: { engine: { type: 'string' } } } }
      });
      palette?.addItem({ command: id, category: trans.__('nnsight-lab') });
    };
    const ask = (id: string, label: string, action: string) =>
      command(
        id,
        label,
        args => (watch.current ? act(context, watch.current, action, { engine: nameOf(args) }) : undefined),
        () => front() !== null
      );

    let could = false;
    watch.changed.connect(() => {
      if ((front() !== null) !== could) {
        could = !could;
        app.commands.notifyCommandChanged();
      }
    });
    command('nnsight-lab:show', trans.__('Show the engine panel'), () => app.shell.activateById(side.id), () => true);
    command(
      'nnsight-lab:start',
      trans.__('Start an engine …'),
      () => {
        app.shell.activateById(side.id);
        requestAnimationFrame(() => side.focusStart());
      },
      () => watch.current !== null
    );
    ask('nnsight-lab:interrupt', trans.__('Interrupt my requests; the engine stays loaded'), wire.INTERRUPT);
    ask('nnsight-lab:restart', trans.__('Restart the engine, with its edits'), wire.RESTART);
    ask('nnsight-lab:stop', trans.__('Stop the engine'), wire.STOP);
    command(
      'nnsight-lab:log',
      trans.__('Show the engine’s log'),
      args => {
        const watched = watch.current;
        if (!watched) {
          return;
        }
        const engine = nameOf(args);
        openLog(app, lab, trans, icon, engine, async () => (await watched.link.act(wire.LOG, { engine })).text ?? trans.__('The kernel did not answer.'));
      },
      () => front() !== null
    );
    // Not in the palette: it is of an engine that is chosen in the panel.
    app.commands.addCommand('nnsight-lab:machine-log', {
      label: trans.__('Show the log of an engine of this machine'),
      execute: args => {
        const found = machine?.status?.engines.find(engine => engine.engine === args.engine);
        if (machine && found) {
          openLog(app, lab, trans, icon, found.name || found.engine, async () => (await machine.log(found.engine)).text);
        }
      },
      describedBy: { args: { type: 'object', properties: { engine: { type: 'string' } } } }
    });
    command(
      'nnsight-lab:saves',
      trans.__('Open the saves in a tab'),
      args => {
        const watched = watch.current;
        if (!watched) {
          return;
        }
        const engine = nameOf(args);
        // The notebook's own: its widgets are drawn by it.
        const output = new SimplifiedOutputArea({
          model: new OutputAreaModel({ trusted: true }),
          rendermime: watched.panel.content.rendermime
        });
        output.future = watched.link.kernel.requestExecute({
          code: `__import__('nnsight_lab').browse(${JSON.stringify(engine)})`,
          store_history: false
        });
        const content = new Panel();
        content.addClass('nnlab-saves-tab');
        content.title.label = trans.__('Saves: %1', engine);
        content.title.icon = icon;
        content.addWidget(output);
        openBeside(app, lab, content, 'split-right');
      },
      () => front() !== null
    );
  }
};
