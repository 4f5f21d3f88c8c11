/** Sizes, durations and states in words. */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { Presence } from './link';
import * as wire from './wire';

/** The translator's name for this extension's strings. */
export const DOMAIN = 'nnsight_lab';

export function bytes(count: number, trans: TranslationBundle): string {
  const units = [trans.__('B'), trans.__('KB'), trans.__('MB'), trans.__('GB'), trans.__('TB')];
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : Number(value.toPrecision(2))} ${units[unit]}`;
}

export function duration(seconds: number, trans: TranslationBundle): string {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) {
    return trans.__('%1 s', whole);
  }
  if (whole < 3600) {
    return trans.__('%1 min', Math.floor(whole / 60));
  }
  return trans.__('%1 h %2 min', Math.floor(whole / 3600), Math.floor((whole % 3600) / 60));
}

export function state(name: string, trans: TranslationBundle): string {
  switch (name) {
    case wire.STARTING:
      return trans.__('starting');
    case wire.READY:
      return trans.__('ready');
    case wire.BUSY:
      return trans.__('busy');
    case wire.ASLEEP:
      return trans.__('asleep');
    case wire.DEAD:
      return trans.__('dead');
    case wire.STOPPED:
      return trans.__('stopped');
    default:
      return name;
  }
}

/** How an engine's steps ran; '' where that is not known. */
export function steps(ran: wire.PanelSteps, trans: TranslationBundle): string {
  if (!ran.graphs) {
    return ran.on_cpu ? trans.__('no graphs on a CPU') : ran.known ? trans.__('no graphs: all module by module') : '';
  }
  const total = ran.replayed + ran.tapped + ran.by_module;
  if (!total) {
    return trans.__('none yet');
  }
  const part = Math.round(((ran.replayed + ran.tapped) / total) * 1000) / 10;
  const taps = ran.tapped ? trans.__(', %1 stopped at taps', ran.tapped.toLocaleString()) : '';
  return trans.__('%1 % of %2 replayed', part, total.toLocaleString()) + taps;
}

/** Why steps ran module by module. */
export function reasons(ran: wire.PanelSteps, trans: TranslationBundle): string {
  const said = (reason: wire.PanelReason) => {
    const count = reason.steps.toLocaleString();
    switch (reason.why) {
      case wire.PROMPT:
        return trans.__('%1 with a prompt', count);
      case wire.FIRST:
        return trans.__('%1 to learn from', count);
      default:
        return reason.asker ? trans.__('%1 for %2 of %3', count, reason.why, reason.asker) : trans.__('%1 for %2', count, reason.why);
    }
  };
  return ran.reasons.map(said).join(', ');
}

/** What was asked for, of an engine. */
export function action(name: string, engine: string, trans: TranslationBundle): string {
  switch (name) {
    case wire.START:
      return trans.__('start %1', engine);
    case wire.RESTART:
      return trans.__('restart %1', engine);
    case wire.STOP:
      return trans.__('stop %1', engine);
    case wire.EDIT_CLEAR:
      return trans.__('clear an edit of %1', engine);
    case wire.END_ORPHAN:
      return trans.__('end %1', engine);
    default:
      return `${name} ${engine}`;
  }
}

/** What stands where a kernel has no engine to show. */
export function presence(found: Presence, version: string, trans: TranslationBundle): string {
  switch (found) {
    case 'unknown':
      return trans.__('Asking the kernel whether nnsight-lab is loaded …');
    case 'other-language':
      return trans.__('This notebook’s kernel is not a Python kernel.');
    case 'missing':
      return trans.__('nnsight-lab is not installed in this notebook’s kernel: run “%1” there.', '%pip install nnsight-lab');
    case 'unloaded':
      return trans.__('nnsight-lab is not loaded in this notebook’s kernel.');
    case 'too-old':
      return trans.__(
        'The nnsight-lab of this notebook’s kernel is older than this panel and tells it nothing: run “%1” there, then restart the kernel.',
        '%pip install -U nnsight-lab'
      );
    case 'older':
      return trans.__(
        'The kernel has nnsight-lab %1, which is older than this panel: run “%2” there, then restart the kernel.',
        version,
        '%pip install -U nnsight-lab'
      );
    case 'newer':
      return trans.__(
        'The kernel has nnsight-lab %1, which is newer than this panel: install that version where JupyterLab runs, then reload the page.',
        version
      );
    case 'loaded':
      return '';
  }
}
