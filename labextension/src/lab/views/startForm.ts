/** The form that starts an engine: a model, options as on a `%engine start` line, judged by the kernel as typed. */
import { element, say } from '../../widgets/dom';
import { button } from '../keyed';
import type { Watched } from '../watch';
import * as wire from '../wire';
import type { Context } from './context';
import { act } from './context';

const PAUSE_MS = 300;
let made = 0;

export class StartForm {
  readonly element: HTMLFormElement;
  readonly #model: HTMLInputElement;
  readonly #options: HTMLInputElement;
  readonly #models: HTMLDataListElement;
  readonly #keep: HTMLInputElement;
  readonly #error: HTMLElement;
  readonly #submit: HTMLButtonElement;
  #timer = 0;
  #asked = 0;

  constructor(
    readonly context: Context,
    readonly watched: () => Watched | null,
    readonly started: () => void
  ) {
    const { trans } = context;
    const id = `nnlab-start-${(made += 1)}`;
    this.#models = element('datalist', { id: `${id}-models` });
    this.#model = element('input', {
      id: `${id}-model`,
      class: 'nnlab-input',
      list: `${id}-models`,
      value: context.defaults.model,
      spellcheck: 'false',
      'aria-describedby': `${id}-error`
    });
    this.#options = element('input', {
      id: `${id}-options`,
      class: 'nnlab-input',
      value: context.defaults.options,
      placeholder: 'max_model_len=2048 dtype=bfloat16',
      spellcheck: 'false',
      'aria-describedby': `${id}-error`
    });
    this.#keep = element('input', { id: `${id}-keep`, type: 'checkbox' });
    this.#error = element('p', { id: `${id}-error`, class: 'nnlab-error', role: 'status', 'aria-live': 'polite' });
    this.#submit = button(trans.__('Start'), () => undefined);
    this.#submit.type = 'submit';
    this.#submit.classList.add('nnlab-primary');
    this.element = element(
      'form',
      { class: 'nnlab-form', 'aria-label': trans.__('Start an engine') },
      element('label', { for: this.#model.id }, trans.__('Model: demo, a Hugging Face id, or a path')),
      this.#model,
      this.#models,
      element('label', { for: this.#options.id }, trans.__('Options (of vLLM; name= for a second engine)')),
      this.#options,
      element('label', { class: 'nnlab-tick', for: this.#keep.id }, this.#keep, trans.__('Keep it running when the kernel ends')),
      this.#error,
      this.#submit
    );
    for (const input of [this.#model, this.#options]) {
      input.addEventListener('input', () => this.#typed());
    }
    this.#keep.addEventListener('change', () => this.#typed());
    this.element.addEventListener('submit', event => {
      event.preventDefault();
      void this.#start();
    });
  }

  focus(): void {
    this.#model.focus();
    this.#model.select();
  }

  update(models: readonly string[]): void {
    const { defaults } = this.context;
    this.#begin(this.#model, defaults.model);
    this.#begin(this.#options, defaults.options);
    const known = [...this.#models.children].map(option => (option as HTMLOptionElement).value);
    if (known.join('\n') !== models.join('\n')) {
      this.#models.replaceChildren(...models.map(model => element('option', { value: model })));
    }
  }

  /** What the settings say now; what was typed stays. */
  #begin(input: HTMLInputElement, value: string): void {
    if (input.defaultValue !== value) {
      const typed = input.value !== input.defaultValue;
      input.defaultValue = value;
      if (!typed) {
        input.value = value;
      }
    }
  }

  get #content(): Record<string, string> {
    const options = this.context.defaults.completed(this.#options.value);
    return { model: this.#model.value, options: this.#keep.checked ? `--keep ${options}` : options };
  }

  #typed(): void {
    window.clearTimeout(this.#timer);
    this.#timer = window.setTimeout(() => void this.#check(), PAUSE_MS);
  }

  async #check(): Promise<void> {
    const watched = this.watched();
    if (watched?.link.presence === 'loaded') {
      const asked = (this.#asked += 1);
      const answer = await watched.link.question(wire.CHECK, this.#content);
      if (asked === this.#asked) {
        this.#judge(answer.ok ? '' : (answer.text ?? this.context.trans.__('The kernel did not answer.')));
      }
    }
  }

  #judge(text: string): void {
    say(this.#error, text);
    for (const input of [this.#model, this.#options]) {
      input.setAttribute('aria-invalid', text ? 'true' : 'false');
    }
  }

  async #start(): Promise<void> {
    const watched = this.watched();
    if (!watched) {
      return;
    }
    window.clearTimeout(this.#timer);
    this.#asked += 1;
    this.#submit.disabled = true;
    try {
      if (watched.link.presence === 'unloaded') {
        const loaded = await watched.link.load();
        if (!loaded.ok) {
          this.#judge(loaded.text ?? this.context.trans.__('The extension could not be loaded.'));
          return;
        }
      }
      const answer = await watched.link.question(wire.CHECK, this.#content);
      this.#judge(answer.ok ? '' : (answer.text ?? this.context.trans.__('The kernel did not answer.')));
      if (answer.ok && (await act(this.context, watched, wire.START, this.#content))) {
        this.started();
      }
    } finally {
      this.#submit.disabled = false;
    }
  }
}
