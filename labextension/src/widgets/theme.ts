import type { Disposer } from './disposer';

/** Whether text here is light, whatever made it so: JupyterLab, VS Code or the browser. */
export function isDark(element: HTMLElement): boolean {
  const parts = getComputedStyle(element).color.match(/[\d.]+/g)?.map(Number) ?? [0, 0, 0];
  return 0.299 * parts[0]! + 0.587 * parts[1]! + 0.114 * parts[2]! > 140;
}

/** What is drawn on a canvas in. */
export interface Inks {
  text: string;
  faint: string;
  accent: string;
  field: string;
}

/**
 * The page's colours as a canvas takes them. Where the system forces its own, a variable holds a word such as
 * `CanvasText`, which a canvas takes for black whatever the page is; an element inside it knows better.
 */
export function inks(canvas: HTMLCanvasElement): Inks {
  let probe = canvas.querySelector<HTMLElement>(':scope > i');
  if (!probe) {
    probe = document.createElement('i');
    canvas.append(probe);
  }
  const named = (name: string) => {
    probe.style.color = `var(--nnl-${name})`;
    return getComputedStyle(probe).color;
  };
  return { text: named('text'), faint: named('faint'), accent: named('accent'), field: named('field') };
}

/** Call back when the page changed its theme. */
export function onTheme(changed: () => void, disposer: Disposer): void {
  const observer = new MutationObserver(() => requestAnimationFrame(changed));
  const attributes = ['class', 'data-jp-theme-name', 'data-jp-theme-light', 'data-vscode-theme-kind', 'data-theme', 'style'];
  for (const target of [document.body, document.documentElement]) {
    observer.observe(target, { attributes: true, attributeFilter: attributes });
  }
  disposer.add(() => observer.disconnect());
  for (const question of ['(prefers-color-scheme: dark)', '(prefers-contrast: more)', '(forced-colors: active)']) {
    const media = matchMedia(question);
    media.addEventListener('change', changed);
    disposer.add(() => media.removeEventListener('change', changed));
  }
}
