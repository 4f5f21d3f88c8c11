/**
 * A cell of ours as a language server may read it: the body as it is, at its own lines and columns, and the
 * first line as an assignment of what it binds. jupyterlab-lsp turns `tracer,model = %trace …` into a call of
 * IPython's, and shows nothing that a server says of that line; a plain `%%trace` cell it would hand over as
 * one long string.
 */

const MARK = /^%%(trace|edit)(?=\s|$)/;
const ABOVE = /^%%(time|capture)(?=\s|$)[ \t]*(.*)/;
const STARTS = /^[ \t]*%engine[ \t]+(start|restart)\b/;
const BINDS = { trace: 'tracer,model', edit: 'tracer,edit,model' };

/** Where the header is; -1 in a cell that is not one of ours. */
function headerLine(lines: string[]): number {
  for (const [index, line] of lines.entries()) {
    if (MARK.test(line)) {
      return index;
    }
    if (line.trim() && !line.trimStart().startsWith('#') && !ABOVE.test(line)) {
      return -1;
    }
  }
  return -1;
}

/** The line at which a header ends that begins at `first`: brackets, strings and backslashes carry it on. */
function lastLine(lines: string[], first: number): number {
  let depth = 0;
  let quote = '';
  for (const [index, whole] of lines.entries()) {
    if (index < first) {
      continue;
    }
    const line = index === first ? whole.replace(MARK, '') : whole;
    let carried = false;
    for (let at = 0; at < line.length; at++) {
      const char = line.charAt(at);
      if (char === '\\') {
        carried = at === line.length - 1;
        at++;
      } else if (quote) {
        if (line.startsWith(quote, at)) {
          at += quote.length - 1;
          quote = '';
        }
      } else if (char === '#') {
        break;
      } else if (char === '"' || char === "'") {
        quote = line.startsWith(char.repeat(3), at) ? char.repeat(3) : char;
        at += quote.length - 1;
      } else if ('([{'.includes(char)) {
        depth++;
      } else if (')]}'.includes(char)) {
        depth--;
      }
    }
    if (quote.length === 1 && !carried) {
      quote = '';
    }
    if (!quote && depth <= 0 && !carried) {
      return index;
    }
  }
  return first; // never closed: it is still being typed
}

/** Whether a cell has something of ours that a language server cannot read. */
export function isOurs(source: string): boolean {
  const lines = source.split('\n');
  return headerLine(lines) >= 0 || lines.some(line => STARTS.test(line));
}

/** The same cell, with as many lines. */
export function asPython(source: string): string {
  const lines = source.split('\n');
  const first = headerLine(lines);
  if (first < 0) {
    return lines.map(line => (STARTS.test(line) ? line.replace('%engine', 'engine,model = %engine') : line)).join('\n');
  }
  const last = lastLine(lines, first);
  return lines
    .map((line, index) => {
      if (index === first) {
        const kind = MARK.exec(line)![1] as keyof typeof BINDS;
        return `${BINDS[kind]} = ${line.slice(1)}`;
      }
      if (index > last) {
        return line;
      }
      if (index > first) {
        return '#';
      }
      const above = ABOVE.exec(line);
      const kept = above?.[1] === 'capture' ? /^[A-Za-z_]\w*/.exec(above[2] ?? '') : null;
      return kept ? `${kept[0]} = %capture` : above ? `# ${line}` : line;
    })
    .join('\n');
}
