/** What is worth hearing of the kernels: an engine that starts, is up, dies or goes. Never a count, nor every request. */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { Watched } from '../watch';
import * as wire from '../wire';
import { presence, state } from '../words';

export class Spoken {
  /** By kernel: what was known of it, as words by engine; its own words under no name. */
  #known = new Map<string, Map<string, string>>();

  constructor(readonly trans: TranslationBundle) {}

  /** What changed since the call before, in words; nothing of a kernel that is seen for the first time. */
  news(all: readonly Watched[]): string {
    const heard: string[] = [];
    for (const { link } of all) {
      if (link.presence === 'unknown' || (link.presence === 'loaded' && !link.status)) {
        continue;
      }
      const before = this.#known.get(link.id);
      const now = this.#words({ link });
      this.#known.set(link.id, now);
      if (before) {
        heard.push(...[...now].filter(([name, words]) => words && before.get(name) !== words).map(([, words]) => words));
        const gone = [...before.keys()].filter(name => name && !now.has(name));
        heard.push(...gone.map(name => this.#engine(name, wire.STOPPED)));
      }
    }
    return heard.join(' ');
  }

  #words({ link }: Pick<Watched, 'link'>): Map<string, string> {
    const words = new Map([['', presence(link.presence, link.status?.version ?? '', this.trans)]]);
    for (const engine of link.status?.engines ?? []) {
      // Whoever runs a cell knows that it is busy, and hears the cell's end.
      const said = this.#engine(engine.name, engine.state === wire.BUSY ? wire.READY : engine.state);
      words.set(engine.name, engine.cause ? `${said} ${engine.cause}` : said);
    }
    return words;
  }

  #engine(name: string, found: string): string {
    return this.trans.__('Engine %1: %2.', name, state(found, this.trans));
  }
}
