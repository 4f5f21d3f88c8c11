/** What the settings say of an engine that is started from the panel; kept true as they change. */
import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import { Signal } from '@lumino/signaling';

export class Defaults {
  readonly changed = new Signal<this, void>(this);
  model = 'demo';
  options = '';
  #mode = 'async';
  #saveBudget = '';

  /** Read them now and whenever they change. */
  follow(settings: ISettingRegistry.ISettings): void {
    const read = () => {
      const value = (name: string) => String(settings.get(name).composite);
      this.model = value('startModel');
      this.options = value('startOptions').trim();
      this.#mode = value('startMode');
      this.#saveBudget = value('saveBudget').replace(/\s/g, '');
      this.changed.emit();
    };
    settings.changed.connect(read);
    read();
  }

  /** What was typed, with what is set and was not typed. */
  completed(options: string): string {
    const has = (name: string) => new RegExp(`(^|\\s)${name}=`).test(options);
    const more = [
      has('mode') ? '' : `mode=${this.#mode}`,
      has('save_budget') || !this.#saveBudget ? '' : `save_budget=${this.#saveBudget}`
    ];
    // In front: what is typed may end in a `name=` that still waits for its value.
    return [...more, options].filter(Boolean).join(' ');
  }
}
