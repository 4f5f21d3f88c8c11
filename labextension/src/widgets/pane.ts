import type { AnyModel } from '@anywidget/types';
import { drawChild } from './child';
import type { Answer, Conversation } from './conversation';
import { Disposer } from './disposer';
import { copy, element } from './dom';
import * as kinds from './kinds';

interface Picture {
  title: string;
  model: string;
}

export interface PaneHooks {
  announce: (text: string) => void;
  failed: (error: Error) => void;
  pin: (number: number, title: string) => void;
  closed: () => void;
}

/** What was opened: one save, or how two compare. */
export class Pane {
  readonly root = element('section', { class: 'nnl-pane', 'aria-label': 'Opened save', hidden: '' });
  number: number | null = null;
  #drawn = new Disposer();
  #turn = 0;
  #askDrop: (() => void) | null = null;
  #dropAsked = false;

  constructor(
    readonly model: AnyModel,
    readonly conversation: Conversation,
    readonly hooks: PaneHooks,
    disposer: Disposer
  ) {
    disposer.add(() => {
      this.#turn++;
      this.#drawn.dispose();
    });
  }

  /** Show one save. */
  async open(number: number): Promise<void> {
    const turn = this.#clear();
    this.number = number;
    await this.conversation.ask(kinds.OPEN, { number, turn }, answer => {
      if (turn === this.#turn && answer.content.title !== undefined) {
        this.#one(number, answer, turn);
      }
    });
  }

  /** Show how two compare. */
  async compare(numbers: number[]): Promise<void> {
    const turn = this.#clear();
    this.number = null;
    const wait = element('p', { class: 'nnl-words' }, 'Comparing …');
    this.root.append(wait);
    this.root.hidden = false;
    try {
      await this.conversation.ask(kinds.COMPARE, { numbers, turn }, ({ content }) => {
        if (turn === this.#turn && content.title !== undefined) {
          this.root.replaceChildren(
            element('div', { class: 'nnl-pane-head' }, element('strong', {}, String(content.title)), this.#closer()),
            element('p', { class: 'nnl-likeness' }, String(content.words))
          );
          this.#draw(content.pictures as Picture[], turn);
          this.hooks.announce(`Compared: ${content.words}`);
        }
      });
    } catch (error) {
      if (turn === this.#turn) {
        wait.textContent = `They cannot be compared: ${(error as Error).message}`;
        wait.setAttribute('role', 'alert');
        this.root.append(this.#closer());
      }
    }
  }

  close(): void {
    const turn = this.#clear();
    this.number = null;
    this.root.hidden = true;
    this.conversation.ask(kinds.OPEN, { number: null, turn }, () => undefined).catch(this.hooks.failed);
    this.hooks.closed();
  }

  /** What is shown is no longer in the store. */
  gone(): void {
    if (this.number !== null && !this.root.querySelector('.nnl-gone')) {
      this.number = null;
      this.root.querySelectorAll('button:not(.nnl-close), input, select').forEach(one => ((one as HTMLButtonElement).disabled = true));
      this.root.prepend(element('p', { class: 'nnl-gone' }, 'This save was dropped.'));
      this.hooks.announce('The opened save was dropped.');
    }
  }

  /** Ask whether the opened save is to be dropped. */
  askDrop(): void {
    // Before the kernel has said what it is, there is nothing to ask about.
    this.#dropAsked = this.#askDrop === null;
    this.#askDrop?.();
  }

  #clear(): number {
    this.#drawn.dispose();
    this.root.replaceChildren();
    this.root.classList.remove('nnl-alone');
    this.#askDrop = null;
    this.#dropAsked = false;
    return ++this.#turn;
  }

  #closer(): HTMLElement {
    const button = element('button', { type: 'button', class: 'nnl-button nnl-close', 'aria-label': 'Close what is opened' }, '✕');
    button.onclick = () => this.close();
    return button;
  }

  #one(number: number, { content }: Answer, turn: number): void {
    const expression = String(content.expression);
    const title = String(content.title);
    const says = element('div', { class: 'nnl-says', role: 'status' });
    const button = (text: string, pressed: () => void) => {
      const made = element('button', { type: 'button', class: 'nnl-button' }, text);
      made.onclick = pressed;
      return made;
    };
    const ask = (kind: string, more: Record<string, unknown>, take: (content: Record<string, unknown>) => void) =>
      this.conversation
        .ask(kind, { number, ...more }, answer => take(answer.content))
        .catch((error: Error) => (says.textContent = error.message));
    const keep = button('', () => {
      void ask(kinds.KEEP, { on: keep.getAttribute('aria-pressed') !== 'true' }, answer => kept(answer.kept === true));
    });
    const kept = (on: boolean) => {
      keep.setAttribute('aria-pressed', String(on));
      keep.textContent = on ? '✓ Request kept' : 'Keep request';
      keep.title = 'A request that is kept is neither spilled to disk nor dropped by age';
    };
    kept(content.kept === true);
    const form = this.#writer(says, ask);
    const write = button('Write …', () => {
      form.hidden = !form.hidden;
      write.setAttribute('aria-expanded', String(!form.hidden));
      form.querySelector('input')?.focus();
    });
    write.setAttribute('aria-expanded', 'false');
    const parts = Number(content.parts);
    const question = element('div', { class: 'nnl-form', role: 'group', 'aria-label': 'Drop?', hidden: '' });
    const drop = button('Drop', () => {
      void ask(kinds.DROP, {}, () => (question.hidden = true));
    });
    const all = parts > 1 ? `, all ${parts} parts of it,` : '';
    question.append(
      element('span', {}, `Drop ${title}${all} from memory and disk?`),
      drop,
      button('Cancel', () => {
        question.hidden = true;
        this.hooks.closed();
      })
    );
    this.#askDrop = () => {
      question.hidden = false;
      question.scrollIntoView({ block: 'nearest' });
      drop.focus();
    };
    this.root.append(
      element(
        'div',
        { class: 'nnl-pane-head' },
        element('strong', {}, title),
        element('span', { class: 'nnl-faint' }, String(content.about)),
        this.#closer()
      ),
      element('div', { class: 'nnl-prompt', title: 'The prompt' }, String(content.prompt)),
      element(
        'div',
        { class: 'nnl-pane-head' },
        element('code', {}, expression),
        button('Copy code', async () => {
          const done = await copy(expression);
          says.textContent = done ? 'Copied.' : 'The browser did not allow copying: select the text instead.';
        }),
        ...(content.bound ? [element('code', { title: 'What was opened, in the notebook; .selected is its label' }, `${content.bound}.value`)] : []),
        button('Pin', () => this.hooks.pin(number, `${title} of ${content.request}`)),
        keep,
        write,
        button('Drop …', () => this.askDrop())
      ),
      ...this.#recipe(String(content.recipe ?? ''), says),
      form,
      question,
      says
    );
    this.root.hidden = false;
    const pictures = content.pictures as Picture[];
    if (pictures.length) {
      // What the picture would say of itself stands above it.
      this.root.classList.add('nnl-alone');
      this.#draw(pictures, turn);
    } else {
      this.#text(number, turn);
    }
    if (this.#dropAsked) {
      this.askDrop();
    }
    this.hooks.announce(`Opened ${title}, ${content.about}`);
  }

  /** The code that makes it again, where that is known. */
  #recipe(code: string, says: HTMLElement): HTMLElement[] {
    if (!code) {
      return [];
    }
    const button = element('button', { type: 'button', class: 'nnl-button' }, 'Copy what made it');
    button.onclick = async () => {
      const done = await copy(code);
      says.textContent = done ? 'Copied the code that makes it.' : 'The browser did not allow copying: select the text instead.';
    };
    const text = element('pre', { class: 'nnl-text', tabindex: '0', 'aria-label': 'The code that makes it' }, code);
    return [element('details', { class: 'nnl-recipe' }, element('summary', {}, 'How it was made'), text, button)];
  }

  #writer(
    says: HTMLElement,
    ask: (kind: string, more: Record<string, unknown>, take: (content: Record<string, unknown>) => void) => Promise<unknown>
  ): HTMLElement {
    const path = element('input', { class: 'nnl-field', placeholder: 'run/first', 'aria-label': 'Path, without .safetensors' });
    const what = element(
      'select',
      { class: 'nnl-select', 'aria-label': 'What to write' },
      element('option', { value: 'save' }, 'this save'),
      element('option', { value: 'request' }, 'the whole request')
    );
    const form = element('form', { class: 'nnl-form', hidden: '' }, 'Write', what, 'to', path);
    form.append(element('button', { type: 'submit', class: 'nnl-button' }, 'Write'));
    path.onkeydown = event => {
      if (event.key === 'Enter') {
        // JupyterLab has its own use for this key, and keeps the form from hearing it.
        event.preventDefault();
        event.stopPropagation();
        form.requestSubmit();
      }
    };
    form.onsubmit = event => {
      event.preventDefault();
      void ask(kinds.WRITE, { path: path.value, whole: what.value === 'request' }, answer => {
        if (answer.written !== undefined) {
          says.textContent = `Written to ${answer.written}`;
          form.hidden = true;
        }
      });
    };
    return form;
  }

  #text(number: number, turn: number): void {
    const text = element('pre', { class: 'nnl-text', tabindex: '0', role: 'group', 'aria-label': 'Value' }, '…');
    this.root.append(text);
    this.conversation
      .ask(kinds.TEXT, { number }, ({ content }) => {
        if (turn === this.#turn && content.text !== undefined) {
          text.textContent = String(content.text);
          if (content.more) {
            this.root.append(element('p', { class: 'nnl-words' }, `… and ${content.more}`));
          }
        }
      })
      .catch(this.hooks.failed);
  }

  /** Pictures are widgets of their own: what draws them comes with them. */
  #draw(pictures: Picture[], turn: number): void {
    for (const { title, model: id } of pictures) {
      const place = element('div', {});
      if (title) {
        this.root.append(element('div', { class: 'nnl-picture-title' }, title));
      }
      this.root.append(place);
      void this.#drawOne(id, place, turn).catch(this.hooks.failed);
    }
  }

  async #drawOne(id: string, place: HTMLElement, turn: number): Promise<void> {
    const undo = await drawChild(this.model, id, place, () => turn === this.#turn);
    if (turn === this.#turn) {
      this.#drawn.add(undo);
    } else {
      undo();
    }
  }
}
