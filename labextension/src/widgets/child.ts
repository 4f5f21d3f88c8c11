import type { AnyModel } from '@anywidget/types';

interface Module {
  default: { render: (props: { model: AnyModel; el: HTMLElement }) => (() => void) | void };
}

const modules = new Map<string, Promise<Module>>();

/** A module from its text, as anywidget makes them. */
function moduleOf(text: string): Promise<Module> {
  let found = modules.get(text);
  if (!found) {
    const address = URL.createObjectURL(new Blob([text], { type: 'text/javascript' }));
    found = (import(/* webpackIgnore: true */ address) as Promise<Module>).finally(() => URL.revokeObjectURL(address));
    modules.set(text, found);
  }
  return found;
}

/** Draw a widget inside another's view, which goes on asking for as long as `wanted`; what undoes it. */
export async function drawChild(model: AnyModel, id: string, place: HTMLElement, wanted: () => boolean): Promise<() => void> {
  const child = await model.widget_manager.get_model(id);
  const { render } = (await moduleOf(String(child.get('_esm')))).default;
  if (!wanted()) {
    return () => undefined;
  }
  // anywidget adds a widget's style with its view, and this one has none of its own.
  const style = document.createElement('style');
  style.textContent = String(child.get('_css'));
  place.before(style);
  const undo = render({ model: child, el: place });
  return () => {
    undo?.();
    style.remove();
  };
}
