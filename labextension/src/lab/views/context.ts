import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { IEditorLanguageRegistry } from '@jupyterlab/codemirror';
import type { JSONObject } from '@lumino/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';

import type { Machine } from '../machine';
import type { Defaults } from '../startDefaults';
import type { Watch, Watched } from '../watch';

/** What every view needs. */
export interface Context {
  app: JupyterFrontEnd;
  watch: Watch;
  trans: TranslationBundle;
  languages: IEditorLanguageRegistry | null;
  defaults: Defaults;
  /** The Jupyter server's own view; null where it is switched off. */
  machine: Machine | null;
  /** Say something to everybody, also to a screen reader. */
  announce: (text: string) => void;
}

/** Ask a kernel for something, and say what came of it where it did not work. */
export async function act(
  context: Context,
  watched: Watched,
  action: string,
  content: JSONObject = {}
): Promise<boolean> {
  const answer = await watched.link.act(action, content);
  if (!answer.ok || answer.text) {
    context.announce(answer.text ?? context.trans.__('The kernel did not answer.'));
  }
  return answer.ok;
}
