import type { Disposer } from './disposer';
import { count, element } from './dom';

/** Which of several prompts is shown: a list of them, or where there are too many a number; null for one prompt. */
export function picker(prompts: string[], total: number, chosen: (number: number) => void, disposer: Disposer): HTMLElement | null {
  if (total < 2) {
    return null;
  }
  if (prompts.length === total) {
    const select = element(
      'select',
      { class: 'nnl-select nnl-prompts', 'aria-label': 'Prompt' },
      ...prompts.map((text, number) => element('option', { value: String(number) }, `${number}: ${text}`))
    );
    disposer.listen(select, 'change', () => chosen(Number(select.value)));
    return element('label', { class: 'nnl-choice' }, element('span', {}, 'Prompt'), select);
  }
  const input = element('input', { type: 'number', class: 'nnl-number', 'aria-label': 'Prompt', min: '0', max: String(total - 1), value: '0' });
  disposer.listen(input, 'change', () => {
    const number = Math.min(Math.max(Math.round(Number(input.value)) || 0, 0), total - 1);
    input.value = String(number);
    chosen(number);
  });
  return element('label', { class: 'nnl-choice' }, element('span', {}, 'Prompt'), input, element('span', {}, `of ${count(total)}`));
}
