import type { Answer } from './conversation';
import { copy, element } from './dom';

/** The exact values around one place, and how to get them in Python. */
export class Detail {
  readonly root = element('section', { class: 'nnl-detail', 'aria-label': 'Detail', hidden: '' });

  constructor(
    readonly closed: () => void,
    readonly announce: (text: string) => void
  ) {}

  get open(): boolean {
    return !this.root.hidden;
  }

  show({ content }: Answer, focus: boolean): void {
    const expression = String(content.expression);
    const button = element('button', { type: 'button', class: 'nnl-button' }, 'Copy');
    button.onclick = async () => {
      const done = await copy(expression);
      this.announce(done ? `Copied ${expression}` : 'The browser did not allow copying: select the text instead.');
    };
    const close = element('button', { type: 'button', class: 'nnl-button', 'aria-label': 'Close the detail' }, '✕');
    close.onclick = () => this.hide();
    const [atRow, atColumn] = content.at as [number, number];
    const near = content.near as string[][];
    const rows = content.rows as string[];
    const columns = content.columns as string[];
    const table = element(
      'table',
      { class: 'nnl-near' },
      element('caption', {}, 'Exact values nearby'),
      element('tr', {}, element('td'), ...columns.map(name => element('th', { scope: 'col' }, name))),
      ...near.map((line, row) =>
        element(
          'tr',
          {},
          element('th', { scope: 'row' }, rows[row] ?? ''),
          ...line.map((value, column) =>
            element('td', row === atRow && column === atColumn ? { class: 'nnl-here', 'aria-current': 'true' } : {}, value)
          )
        )
      )
    );
    this.root.replaceChildren(
      element(
        'div',
        { class: 'nnl-detail-head' },
        element('strong', {}, String(content.text)),
        element('span', {}, String(content.where)),
        element('code', {}, expression),
        button,
        close
      ),
      element('div', { class: 'nnl-near-box' }, table)
    );
    this.root.hidden = false;
    if (focus) {
      button.focus();
    }
  }

  hide(): void {
    if (this.open) {
      this.root.hidden = true;
      this.closed();
    }
  }
}
