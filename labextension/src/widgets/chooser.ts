import type { AnyModel } from '@anywidget/types';
import type { Conversation } from './conversation';
import { Disposer } from './disposer';
import * as kinds from './kinds';
import { choosePosition, chosenPosition, onPosition } from './position';

/** The chosen position of a view's sequence: told to the page's other views and to the kernel, heard from both. */
export class Chooser {
  #heard = new Disposer();
  #sequence: string | null = null;

  constructor(
    readonly model: AnyModel,
    readonly conversation: Conversation,
    /** Whether a position can be shown here: another view of the sequence may show more of it. */
    readonly knows: (position: number) => boolean,
    /** Mark it, or nothing. */
    readonly mark: (position: number | null) => void,
    disposer: Disposer
  ) {
    const moved = () => this.#moved();
    model.on('change:position', moved);
    disposer.add(() => {
      model.off('change:position', moved);
      this.#heard.dispose();
    });
    this.follow();
  }

  /** What is chosen here. */
  get position(): number | null {
    return (this.model.get('position') as number | null | undefined) ?? null;
  }

  /** Choose, for everybody. */
  choose(position: number | null): void {
    this.#take(position);
    this.mark(position);
  }

  /** Hear the other views of the sequence; called again when it has become known. */
  follow(): void {
    const sequence = String(this.model.get('sequence') ?? '');
    if (sequence === this.#sequence) {
      return;
    }
    this.#sequence = sequence;
    this.#heard.dispose();
    if (this.position !== null) {
      // Chosen in a cell before there was a view.
      choosePosition(sequence, this.position, this.conversation.view);
    }
    const heard = (position: number | null) => {
      const mine = position !== null && this.knows(position) ? position : null;
      this.#take(mine);
      this.mark(mine);
    };
    onPosition(sequence, this.conversation.view, heard, this.#heard);
    this.mark(this.position);
  }

  /** The model's position changed: in a cell, or in a view. */
  #moved(): void {
    const { position } = this;
    const elsewhere = chosenPosition(this.#sequence ?? '');
    // What cannot be shown here stays chosen elsewhere.
    if (position !== elsewhere && (position !== null || (elsewhere !== null && this.knows(elsewhere)))) {
      choosePosition(this.#sequence ?? '', position, this.conversation.view);
    }
    this.mark(position);
  }

  #take(position: number | null): void {
    if (this.position !== position) {
      this.model.set('position', position);
      // Where no kernel answers, the page goes on by itself.
      this.conversation.ask(kinds.CHOOSE, { position }, () => undefined).catch(() => undefined);
    }
  }
}
