import type { AnyModel, RenderProps } from '@anywidget/types';
import { element } from './dom';
import * as kinds from './kinds';

const VIEW = 'data-nnl-view';

/**
 * Escape goes back to where the page's own keys work: to the cell, in JupyterLab. What a view shuts by Escape it shuts
 * before, and keeps the key to itself; a view inside another leaves it to that one.
 */
function leave(el: HTMLElement): () => void {
  const pressed = (event: KeyboardEvent) => {
    // A view's own listener on this element is not kept from us by `stopPropagation`, and says so here.
    const taken = event.defaultPrevented || event.cancelBubble;
    if (event.key === 'Escape' && !taken && !el.parentElement?.closest(`[${VIEW}]`)) {
      event.preventDefault();
      event.stopPropagation();
      const around = el.parentElement?.closest<HTMLElement>('[tabindex]');
      if (around) {
        around.focus({ preventScroll: true });
      } else {
        (document.activeElement as HTMLElement | null)?.blur();
      }
    }
  };
  el.setAttribute(VIEW, '');
  el.addEventListener('keydown', pressed);
  return () => el.removeEventListener('keydown', pressed);
}

/** A widget's way into a page: its view, or, where that fails, what went wrong, there and in the kernel's log. */
export function rendered(
  make: (model: AnyModel, el: HTMLElement) => { dispose(): void }
): (props: RenderProps) => () => void {
  return ({ model, el }) => {
    try {
      const view = make(model, el);
      const stay = leave(el);
      return () => {
        stay();
        view.dispose();
      };
    } catch (error) {
      el.replaceChildren(element('div', { role: 'alert' }, `This view failed: ${(error as Error).message}`));
      model.send({ [kinds.KIND]: kinds.FAILED, [kinds.ERROR]: (error as Error).stack ?? String(error) });
      return () => el.replaceChildren();
    }
  };
}
