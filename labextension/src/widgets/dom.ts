/** What takes the focus by itself. */
const FOCUSABLE = new Set(['button', 'input', 'select', 'summary', 'textarea']);

/**
 * An element with its attributes and children.
 *
 * JupyterLab looks for its own shortcuts at the focused element before it looks at what is around that: on a
 * slider the arrows would fold headings, on a button Enter would edit the cell. So what has the focus says
 * itself that its keys are its own.
 */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, string> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  if (FOCUSABLE.has(tag) || 'tabindex' in attributes) {
    made.setAttribute('data-lm-suppress-shortcuts', 'true');
  }
  made.append(...children);
  return made;
}

/** A button with a sign on it, and its name in words. */
export function button(text: string, label: string, pressed: () => void): HTMLButtonElement {
  const made = element('button', { type: 'button', class: 'nnl-button', 'aria-label': label, title: label }, text);
  made.onclick = pressed;
  return made;
}

/** Set a text only where it changed, so that nothing is laid out or read aloud anew. */
export function say(target: HTMLElement, text: string): void {
  if (target.textContent !== text) {
    target.textContent = text;
  }
}

/** A number with its thousands apart. */
export function count(value: number): string {
  return value.toLocaleString('en-US');
}

/** A number with four digits, as the kernel writes it. */
export function short(value: number): string {
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) {
    return value.toExponential(2).replace('e+', 'e');
  }
  return String(Number(value.toPrecision(4)));
}

/** Copy a text; false where the browser does not let us. */
export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages without a secure address have no clipboard: the older way needs a selection.
    const area = element('textarea', { style: 'position:fixed;opacity:0' });
    area.value = text;
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand('copy');
    area.remove();
    (focused as HTMLElement | null)?.focus?.();
    return done;
  }
}
