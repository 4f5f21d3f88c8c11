/** The words of the conversation with the kernel: mirrors of `nnsight_lab/widgets/kinds.py`, which a test compares. */

export const ASK = 'ask';
export const ANSWER = 'answer';
export const KIND = 'kind';
export const LAST = 'last';
export const ERROR = 'error';
export const DROPPED = 'dropped';
export const VIEW = 'view';

export const HERE = 'here';
export const GONE = 'gone';
export const FAILED = 'failed';

export const TILES = 'tiles';
export const LINE = 'line';
export const VALUE = 'value';
export const DETAIL = 'detail';
export const LABELS = 'labels';

export const PAGE = 'page';
export const STATISTICS = 'statistics';
export const OPEN = 'open';
export const TEXT = 'text';
export const COMPARE = 'compare';
export const WRITE = 'write';
export const KEEP = 'keep';
export const DROP = 'drop';
export const CLOSE = 'close';
export const CHANGED = 'changed';

export const PROMPT = 'prompt';
export const CELLS = 'cells';
export const CELL = 'cell';
export const HEADS = 'heads';
export const CHOOSE = 'choose';
export const TOKENS = 'tokens';
export const STOP = 'stop';
export const GREW = 'grew';
