/** Recent requests and what they saved: opened in a tab, dragged into a cell, or inserted by a key. */
import { element, say } from '../../widgets/dom';
import { button, Keyed } from '../keyed';
import type { Watched } from '../watch';
import type { PanelSave } from '../wire';
import { bytes } from '../words';
import type { Context } from './context';

interface Request {
  id: string;
  saves: PanelSave[];
}

export class SavesView {
  readonly element: HTMLElement;
  readonly #list: Keyed<Request>;
  readonly #none: HTMLElement;
  readonly #open: HTMLButtonElement;

  constructor(
    readonly context: Context,
    readonly watched: Watched
  ) {
    const { trans } = context;
    const list = element('ul', { class: 'nnlab-list', 'aria-label': trans.__('Recent requests') });
    this.#none = element('p', { class: 'nnlab-faint' }, trans.__('Nothing was saved yet. “%1” in a block keeps a value.', '.save()'));
    this.#open = button(trans.__('Open the saves in a tab'), () => void context.app.commands.execute('nnsight-lab:saves'));
    this.element = element('div', { class: 'nnlab-saves' }, element('div', { class: 'nnlab-actions' }, this.#open), this.#none, list);
    this.#list = new Keyed(
      list,
      request => request.id,
      request => this.#make(request)
    );
  }

  update(saves: readonly PanelSave[]): void {
    this.#none.hidden = saves.length > 0;
    this.#open.hidden = saves.length === 0;
    const requests = new Map<string, Request>();
    for (const save of saves) {
      const found = requests.get(save.request_id) ?? { id: save.request_id, saves: [] };
      found.saves.push(save);
      requests.set(save.request_id, found);
    }
    this.#list.show([...requests.values()]);
  }

  #make(first: Request): { element: HTMLElement; update: (request: Request) => void } {
    const prompt = element('summary', {});
    const rows = element('ul', { class: 'nnlab-list' });
    const keyed = new Keyed<PanelSave>(
      rows,
      save => `${save.block} ${save.name} ${save.code}`,
      save => this.#save(save)
    );
    const item = element('li', {}, element('details', {}, prompt, rows));
    return {
      element: item,
      update: request => {
        const total = request.saves.reduce((sum, save) => sum + save.bytes, 0);
        const { trans } = this.context;
        const values = trans._n('%1 value', '%1 values', request.saves.length);
        say(prompt, `${request.saves[0]?.prompt || first.id} · ${values}, ${bytes(total, trans)}`);
        prompt.title = request.id;
        keyed.show(request.saves);
      }
    };
  }

  #save(save: PanelSave): { element: HTMLElement; update: () => void } {
    const { trans } = this.context;
    const shape = save.shape.length ? ` [${save.shape.join(', ')}] ${save.dtype}` : ` ${save.dtype}`;
    const step = save.step >= 0 ? `[${save.step}]` : '';
    const text = element('span', { class: 'nnlab-save-name' }, `${save.block} · ${save.name}${step}`);
    const item = element(
      'li',
      { class: 'nnlab-save', draggable: 'true', title: trans.__('Drag into a cell: %1', save.code) },
      text,
      element('span', { class: 'nnlab-faint' }, shape),
      button(trans.__('Insert'), () => this.#insert(save), trans.__('Insert the code that reads %1 into the active cell', save.name))
    );
    item.addEventListener('dragstart', event => {
      event.dataTransfer?.setData('text/plain', save.code);
      if (event.dataTransfer) {
        event.dataTransfer.effectAllowed = 'copy';
      }
    });
    return { element: item, update: () => undefined };
  }

  #insert(save: PanelSave): void {
    const editor = this.watched.panel.content.activeCell?.editor;
    if (editor?.replaceSelection) {
      editor.replaceSelection(save.code);
      editor.focus();
    } else {
      this.context.announce(this.context.trans.__('No cell is active.'));
    }
  }
}
