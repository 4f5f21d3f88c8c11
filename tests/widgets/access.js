// What `access.py` asks a page, as the functions of `walked`.
(() => {
  const scratch = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = colour => {
    scratch.clearRect(0, 0, 1, 1);
    scratch.fillStyle = colour;
    scratch.fillRect(0, 0, 1, 1);
    return [...scratch.getImageData(0, 0, 1, 1).data];
  };
  // As WCAG 2 defines them.
  const linear = share => (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const contrast = (one, other) => {
    const [light, dark] = [luminance(one), luminance(other)].sort((x, y) => y - x);
    return (light + 0.05) / (dark + 0.05);
  };
  const behind = one => {
    for (let at = one.parentElement; at; at = at.parentElement) {
      const found = rgba(getComputedStyle(at).backgroundColor);
      if (found[3] > 250) {
        return found;
      }
    }
    return [255, 255, 255, 255];
  };
  const name = one => `${one.tagName.toLowerCase()} ${one.getAttribute('aria-label') ?? one.textContent.trim()}`.slice(0, 90);
  const look = one => {
    const style = getComputedStyle(one);
    return {
      outline: [style.outlineStyle, style.outlineWidth, style.outlineColor].join(' '),
      outlined: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1,
      colour: style.outlineColor,
      shadow: style.boxShadow
    };
  };

  window.walked = {
    /** The names of everything that the Tab key should reach, in the page's order. */
    reachable(root) {
      const asks = 'a[href],button,input,select,textarea,summary,[contenteditable=true],[tabindex]';
      return [root, ...root.querySelectorAll(asks)]
        .filter(one => one.matches(asks) && one.tabIndex >= 0 && !one.disabled)
        .filter(one => one.checkVisibility({ visibilityProperty: true }))
        .map(name);
    },

    /** What has the focus, how that shows, and its contrast to what is behind it. */
    stop() {
      const one = document.activeElement;
      const on = look(one);
      one.blur();
      const off = look(one);
      one.focus({ focusVisible: true, preventScroll: true });
      const shadow = on.shadow !== off.shadow ? on.shadow : '';
      const seen = on.outlined && on.outline !== off.outline ? on.outline : shadow;
      return [name(one), seen, contrast(rgba(on.colour), behind(one))];
    },

    /** The contrast of the strongest pixel under a picture's plot, where a heatmap's columns have their numbers. */
    edge(canvas) {
      const high = Math.round(14 * devicePixelRatio);
      const pixels = canvas.getContext('2d').getImageData(0, canvas.height - high, canvas.width, high).data;
      const page = behind(canvas);
      let most = 1;
      for (let at = 0; at < pixels.length; at += 4) {
        const part = pixels[at + 3] / 255;
        const seen = [0, 1, 2].map(n => part * pixels[at + n] + (1 - part) * page[n]);
        most = Math.max(most, contrast(seen, page));
      }
      return most;
    },

    /** The contrast of the heads of rows, at the left, to the commonest pixel there, which must be the page's. */
    heads(canvas) {
      const wide = Math.round(56 * devicePixelRatio);
      const pixels = canvas.getContext('2d').getImageData(0, 0, wide, canvas.height).data;
      const page = behind(canvas);
      const seen = new Map();
      for (let at = 0; at < pixels.length; at += 4) {
        const part = pixels[at + 3] / 255;
        const key = [0, 1, 2].map(n => Math.round(part * pixels[at + n] + (1 - part) * page[n])).join();
        seen.set(key, (seen.get(key) ?? 0) + 1);
      }
      const [[common]] = [...seen].sort((one, other) => other[1] - one[1]);
      const ground = common.split(',').map(Number);
      const most = Math.max(...[...seen.keys()].map(key => contrast(key.split(',').map(Number), ground)));
      return contrast(ground, page) < 1.1 ? most : 0;
    },

    /** A button before an element and one behind it, to begin and to end a walk at. */
    fence(root) {
      for (const [where, id] of [['beforebegin', 'walk-before'], ['afterend', 'walk-after']]) {
        const mark = document.createElement('button');
        mark.id = mark.textContent = id;
        root.insertAdjacentElement(where, mark);
      }
    },

    unfence() {
      document.querySelectorAll('#walk-before, #walk-after').forEach(mark => mark.remove());
    }
  };
})();
