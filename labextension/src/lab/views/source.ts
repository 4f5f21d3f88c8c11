/** The source of an edit, coloured as Python; and what changed since the version before. */
import type { IEditorLanguageRegistry } from '@jupyterlab/codemirror';

import { element } from '../../widgets/dom';

export function showSource(target: HTMLElement, source: string, languages: IEditorLanguageRegistry | null): void {
  if (target.dataset.source === source) {
    return;
  }
  target.dataset.source = source;
  target.textContent = source;
  const python = languages?.findByName('python');
  if (languages && python) {
    void languages.getLanguage(python).then(async language => {
      if (language && target.dataset.source === source) {
        const coloured = document.createElement('div');
        await languages.highlight(source, language, coloured);
        if (target.dataset.source === source) {
          target.replaceChildren(...coloured.childNodes);
        }
      }
    });
  }
}

interface Line {
  mark: ' ' | '+' | '-';
  text: string;
}

/** By the longest common lines; blocks are short. */
export function difference(before: string, after: string): Line[] {
  const old = before.split('\n');
  const now = after.split('\n');
  const common: number[][] = Array.from({ length: old.length + 1 }, () => new Array<number>(now.length + 1).fill(0));
  const at = (i: number, j: number) => common[i]?.[j] ?? 0;
  for (let i = old.length - 1; i >= 0; i--) {
    for (let j = now.length - 1; j >= 0; j--) {
      common[i]![j] = old[i] === now[j] ? at(i + 1, j + 1) + 1 : Math.max(at(i + 1, j), at(i, j + 1));
    }
  }
  const lines: Line[] = [];
  let i = 0;
  let j = 0;
  while (i < old.length || j < now.length) {
    if (i < old.length && j < now.length && old[i] === now[j]) {
      lines.push({ mark: ' ', text: old[i]! });
      i += 1;
      j += 1;
    } else if (i < old.length && (j === now.length || at(i + 1, j) >= at(i, j + 1))) {
      lines.push({ mark: '-', text: old[i]! });
      i += 1;
    } else {
      lines.push({ mark: '+', text: now[j]! });
      j += 1;
    }
  }
  return lines;
}

export function differenceView(before: string, after: string, title: string): HTMLElement {
  const list = element('pre', { class: 'nnlab-diff', tabindex: '0', role: 'group', 'aria-label': title });
  for (const { mark, text } of difference(before, after)) {
    // A screen reader has its own words for these.
    list.append(element(mark === '+' ? 'ins' : mark === '-' ? 'del' : 'div', {}, `${mark} ${text}`));
  }
  return list;
}
