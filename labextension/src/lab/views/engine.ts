/** One engine: what it is, what it does, and what can be done with it. */
import { Clipboard } from '@jupyterlab/apputils';

import { element, say } from '../../widgets/dom';
import { button, rename } from '../keyed';
import type { Watched } from '../watch';
import * as wire from '../wire';
import type { PanelEngine } from '../wire';
import { bytes, duration, reasons, state, steps } from '../words';
import type { Context } from './context';
import { act } from './context';
import { EditsView } from './edits';

export class EngineView {
  readonly element: HTMLElement;
  readonly #state = element('span', { class: 'nnlab-state' });
  readonly #model = element('div', { class: 'nnlab-model' });
  readonly #cause = element('p', { class: 'nnlab-error' });
  readonly #figures = element('dl', { class: 'nnlab-figures' });
  readonly #values = new Map<string, { row: HTMLElement; value: HTMLElement; bar: HTMLElement | null }>();
  readonly #buttons = new Map<string, HTMLButtonElement>();
  readonly #edits: EditsView;
  readonly #attach: HTMLButtonElement;
  #line = '';

  constructor(
    readonly context: Context,
    readonly watched: Watched,
    engine: PanelEngine
  ) {
    const { trans } = context;
    const named = { engine: engine.name };
    const actions = element('div', { class: 'nnlab-actions', role: 'group', 'aria-label': trans.__('Engine %1', engine.name) });
    const add = (action: string, label: string, title: string, pressed?: () => void) => {
      const made = button(label, pressed ?? (() => void act(context, watched, action, named)), title);
      this.#buttons.set(action, made);
      actions.append(made);
    };
    add(wire.INTERRUPT, trans.__('Interrupt'), trans.__('Interrupt my requests on engine %1; it stays loaded', engine.name));
    add(wire.RESTART, trans.__('Restart'), trans.__('Restart engine %1 with its edits', engine.name));
    add(wire.STOP, trans.__('Stop'), trans.__('Stop engine %1 and free its memory', engine.name));
    add(wire.SLEEP, trans.__('Sleep'), '', () => {
      void act(context, watched, this.element.dataset.state === wire.ASLEEP ? wire.WAKE : wire.SLEEP, named);
    });
    add(wire.LOG, trans.__('Log'), trans.__('Show the log of engine %1', engine.name), () => {
      void context.app.commands.execute('nnsight-lab:log', named);
    });
    this.#attach = button(
      trans.__('Copy attach line'),
      () => {
        // Not the browser's own, which there is on secure pages only.
        Clipboard.copyToSystem(this.#line);
        context.announce(trans.__('Copied: %1', this.#line));
      },
      trans.__('Copy attach line of engine %1, for another notebook', engine.name)
    );
    actions.append(this.#attach);
    this.#edits = new EditsView(context, watched, engine.name);
    const heading = element('h4', { class: 'nnlab-name' }, element('span', {}, engine.name), this.#state);
    this.element = element('section', { class: 'nnlab-engine', 'aria-label': trans.__('Engine %1', engine.name) });
    this.element.append(heading, this.#model, this.#cause, this.#figures, actions, this.#edits.element);
  }

  update(engine: PanelEngine): void {
    const { trans } = this.context;
    const age = this.watched.link.age;
    const starting = engine.state === wire.STARTING;
    this.element.dataset.state = engine.state;
    say(this.#state, state(engine.state, trans));
    const options = engine.options.length ? ` · ${engine.options.join(' ')}` : '';
    say(this.#model, `${engine.model} · ${engine.mode}${options}`);
    say(this.#cause, engine.cause);
    this.#cause.hidden = !engine.cause;

    this.#figure('phase', trans.__('Phase'), starting ? `${engine.phase} (${duration(engine.phase_s + age, trans)})` : '');
    const asleep = engine.state === wire.ASLEEP;
    const alive = engine.state === wire.READY || engine.state === wire.BUSY || asleep;
    this.#figure('requests', trans.__('Requests'), alive ? trans.__('%1 running, %2 waiting', engine.running, engine.waiting) : '');
    this.#figure('rate', trans.__('Tokens/s'), alive ? String(Math.round(engine.tokens_per_s)) : '');
    const kv = engine.kv_used;
    this.#figure('kv', trans.__('KV cache'), alive && kv >= 0 ? trans.__('about %1 %', Math.round(kv * 1000) / 10) : '', kv);
    // An older kernel tells nothing of them.
    const ran = alive && engine.steps ? engine.steps : null;
    this.#figure('steps', trans.__('Steps'), ran ? steps(ran, trans) : '');
    this.#figure('reasons', trans.__('By module'), ran ? reasons(ran, trans) : '');
    const disk = engine.saves_disk_bytes ? trans.__(', %1 on disk', bytes(engine.saves_disk_bytes, trans)) : '';
    const part = engine.saves_budget_bytes ? engine.saves_bytes / engine.saves_budget_bytes : 0;
    this.#figure(
      'saves',
      trans.__('Saves'),
      // Until it is up, its budget is not known.
      alive || engine.saves_bytes ? trans.__('%1 of %2', bytes(engine.saves_bytes, trans), bytes(engine.saves_budget_bytes, trans)) + disk : '',
      part
    );
    const gpu = engine.gpu_bytes ? trans.__(', %1 on the GPU', bytes(engine.gpu_bytes, trans)) : '';
    this.#figure('memory', trans.__('Memory'), engine.memory_bytes ? bytes(engine.memory_bytes, trans) + gpu : '');
    const idle = engine.idle_s ? trans.__(', idle for %1', duration(engine.idle_s + age, trans)) : '';
    this.#figure('up', trans.__('Up'), alive ? duration(engine.up_s + age, trans) + idle : '');
    this.#figure('pids', trans.__('Processes'), engine.pids.join(', '));

    this.#usable(wire.INTERRUPT, engine.state === wire.BUSY);
    this.#usable(wire.RESTART, !starting);
    // Where it cannot sleep, the button's name and tooltip say why.
    const sleep = this.#buttons.get(wire.SLEEP)!;
    this.#usable(wire.SLEEP, asleep || (engine.state === wire.READY && !engine.no_sleep));
    say(sleep, asleep ? trans.__('Wake') : trans.__('Sleep'));
    sleep.title = asleep
      ? trans.__('Wake engine %1; the next request does that too', engine.name)
      : engine.no_sleep || trans.__('Free the GPU of engine %1 and keep its weights; the next request wakes it', engine.name);
    sleep.setAttribute('aria-label', asleep ? trans.__('Wake engine %1', engine.name) : trans.__('Sleep: %1', sleep.title));
    this.#usable(wire.STOP, engine.state !== wire.STOPPED);
    const stop = this.#buttons.get(wire.STOP)!;
    this.#line = engine.attach;
    this.#attach.hidden = !engine.attach;
    if (engine.attach) {
      rename(stop, trans.__('Detach'), trans.__('Let go of engine %1, which goes on for others', engine.name));
    } else if (starting) {
      rename(stop, trans.__('Give up'), trans.__('Give up the start of engine %1', engine.name));
    } else {
      rename(stop, trans.__('Stop'), trans.__('Stop engine %1 and free its memory', engine.name));
    }
    this.#edits.update(engine);
  }

  #usable(action: string, usable: boolean): void {
    const found = this.#buttons.get(action)!;
    // Not `disabled`, which would take the keyboard's place away from under it.
    found.setAttribute('aria-disabled', usable ? 'false' : 'true');
  }

  #figure(key: string, label: string, text: string, part = -1): void {
    let found = this.#values.get(key);
    if (!found) {
      const value = element('span', {});
      const bar = part >= 0 || key === 'kv' || key === 'saves' ? element('span', { class: 'nnlab-bar', 'aria-hidden': 'true' }, element('span', {})) : null;
      const row = element('div', { class: 'nnlab-figure' }, element('dt', {}, label), element('dd', {}, value, ...(bar ? [bar] : [])));
      found = { row, value, bar };
      this.#values.set(key, found);
      this.#figures.append(row);
    }
    found.row.hidden = !text;
    say(found.value, text);
    if (found.bar) {
      (found.bar.firstElementChild as HTMLElement).style.width = `${Math.min(100, Math.max(0, part) * 100)}%`;
    }
  }
}
