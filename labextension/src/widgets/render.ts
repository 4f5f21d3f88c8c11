import type { AnyModel, RenderProps } from '@anywidget/types';
import { element } from './dom';
import * as kinds from './kinds';

/** A widget's way into a page: its view, or, where that fails, what went wrong, there and in the kernel's log. */
export function rendered(
  make: (model: AnyModel, el: HTMLElement) => { dispose(): void }
): (props: RenderProps) => () => void {
  return ({ model, el }) => {
    try {
      const view = make(model, el);
      return () => view.dispose();
    } catch (error) {
      el.replaceChildren(element('div', { role: 'alert' }, `This view failed: ${(error as Error).message}`));
      model.send({ [kinds.KIND]: kinds.FAILED, [kinds.ERROR]: (error as Error).stack ?? String(error) });
      return () => el.replaceChildren();
    }
  };
}
