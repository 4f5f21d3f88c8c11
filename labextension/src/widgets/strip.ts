import type { AnyModel } from '@anywidget/types';
import { drawChild } from './child';
import { Conversation, KernelError } from './conversation';
import { Disposer } from './disposer';
import { element, say } from './dom';
import * as kinds from './kinds';
import { rendered } from './render';

/** The line below a cell that says what it saved; the browser is under it while it is opened. */
class Strip {
  #disposer = new Disposer();
  #conversation: Conversation;
  #toggle = element('button', { type: 'button', class: 'nnl-button nnl-toggle', 'aria-expanded': 'false' });
  #place: HTMLElement | null = null;
  #body = element('div', { class: 'nnl-saved-body' });
  #error = element('div', { class: 'nnl-error', role: 'alert', hidden: '' });
  #wait = element('div', { class: 'nnl-words', role: 'status', hidden: '' });
  #undo: () => void = () => undefined;
  #turn = 0;

  constructor(
    readonly model: AnyModel,
    readonly root: HTMLElement
  ) {
    this.#conversation = new Conversation(model, this.#disposer);
    this.#conversation.slow = slow => {
      say(this.#wait, 'The kernel has not answered yet. If it is busy it will; if it is gone, run the cell again.');
      this.#wait.hidden = !slow;
    };
    root.classList.add('nnl-saved');
    root.setAttribute('role', 'group');
    root.setAttribute('aria-label', String(model.get('described')));
    root.setAttribute('data-lm-suppress-shortcuts', 'true');
    this.#toggle.onclick = () => (this.#place ? this.#close() : void this.#open(null));
    const names = model.get('names') as [string, string][];
    const chips = names.map(([name, about], item) => {
      const title = `Look at ${name}`;
      const chip = element('button', { type: 'button', class: 'nnl-button nnl-named', title }, element('span', {}, name), element('span', { class: 'nnl-faint' }, about));
      chip.onclick = () => void this.#open(item);
      return chip;
    });
    const words = element('span', { class: 'nnl-faint' }, String(model.get('words')));
    root.append(element('div', { class: 'nnl-saved-head' }, this.#toggle, ...chips, words), this.#wait, this.#error, this.#body);
    this.#disposer.listen(root, 'keydown', event => {
      if (event.key === 'Escape' && this.#place && !event.defaultPrevented) {
        this.#close();
        event.stopPropagation();
      }
    });
    this.#disposer.add(() => {
      this.#turn++;
      this.#undo();
    });
    this.#draw();
  }

  dispose(): void {
    this.#disposer.dispose();
  }

  async #open(item: number | null): Promise<void> {
    const turn = ++this.#turn;
    this.#error.hidden = true;
    try {
      let id = '';
      await this.#conversation.ask(kinds.OPEN, { item }, ({ content }) => (id = String(content.model ?? id)));
      if (turn !== this.#turn || this.#place) {
        return; // the browser that is there was told which row
      }
      const place = (this.#place = element('div', {}));
      this.#body.append(place);
      this.#draw();
      this.#undo = await drawChild(this.model, id, place, () => this.#place === place);
    } catch (error) {
      this.#fail(error as Error);
    }
  }

  #close(): void {
    this.#turn++;
    this.#undo();
    this.#undo = () => undefined;
    this.#place = null;
    this.#body.replaceChildren();
    this.#draw();
    this.#toggle.focus({ preventScroll: true });
    this.#conversation.ask(kinds.CLOSE, {}, () => undefined).catch(error => this.#fail(error as Error));
  }

  #draw(): void {
    const open = this.#place !== null;
    say(this.#toggle, open ? '▾ Saved' : '▸ Saved');
    this.#toggle.setAttribute('aria-expanded', String(open));
    this.#toggle.title = open ? 'Close the table' : 'Look at what this cell saved';
    this.root.dataset.open = String(open);
  }

  #fail(error: Error): void {
    if (!(error instanceof KernelError)) {
      this.#conversation.tell(kinds.FAILED, { [kinds.ERROR]: error.stack ?? String(error) });
    }
    say(this.#error, error.message);
    this.#error.hidden = false;
  }
}

export default { render: rendered((model, el) => new Strip(model, el)) };
