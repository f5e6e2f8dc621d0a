"""Renders emoji of several artists to PNG files, as sprites for benchmarks/hard/make_data.py.

    npm pack @iconify-json/noto @iconify-json/twemoji @iconify-json/openmoji @iconify-json/emojione \\
        @iconify-json/fluent-emoji-flat
    for file in *.tgz; do mkdir -p "${file%.tgz}" && tar xzf "$file" -C "${file%.tgz}"; done
    python -m benchmarks.hard.sprites --npm DIR --out data/sprites

It needs rsvg-convert (package librsvg2-bin). The sprites lie in OUT/CONCEPT/SET.png. Their licences: noto Apache 2.0,
twemoji CC BY 4.0, openmoji CC BY-SA 4.0, emojione CC BY 4.0, fluent-emoji-flat MIT.
"""

import argparse
import json
import subprocess
from pathlib import Path

SETS = ('noto', 'twemoji', 'openmoji', 'emojione', 'fluent-emoji-flat')
# Fewer would be learnt by heart.
MIN_ARTISTS = 3
CONCEPTS = Path(__file__).with_name('concepts.txt')


def find_icon(icons: dict, name: str) -> dict | None:
    """The icon of a name or of what the name is an alias of, in the format of Iconify."""
    while name not in icons['icons']:
        if name not in icons.get('aliases', {}):
            return None
        name = icons['aliases'][name]['parent']
    return icons['icons'][name]


def write_svg(icons: dict, icon: dict) -> str:
    """An icon as an SVG file."""
    box = [icon.get(key, icons.get(key, default)) for key, default in dict(left=0, top=0, width=16, height=16).items()]
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {names} viewBox="{" ".join(map(str, box))}">{icon["body"]}</svg>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--npm', type=Path, required=True, help='folder of the unpacked packages')
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--concepts', type=Path, default=CONCEPTS, help='names of icons, one a line')
    parser.add_argument('--size', type=int, default=160, help='side in pixels (default %(default)s)')
    args = parser.parse_args()
    concepts = args.concepts.read_text().split()
    drawn = dict.fromkeys(concepts, 0)
    for name in SETS:
        files = sorted(args.npm.glob(f'iconify-json-{name}-[0-9]*/package/icons.json'))
        if not files:
            raise SystemExit(
                f'{args.npm} has no iconify-json-{name}-*/package/icons.json: unpack the npm package there'
            )
        icons = json.loads(files[-1].read_text())
        for concept in concepts:
            icon = find_icon(icons, concept)
            if icon is None:
                continue
            file = args.out / concept / f'{name}.png'
            file.parent.mkdir(parents=True, exist_ok=True)
            command = ['rsvg-convert', '--keep-aspect-ratio', f'--width={args.size}', f'--height={args.size}']
            subprocess.run([*command, f'--output={file}'], input=write_svg(icons, icon).encode(), check=True)
            drawn[concept] += 1
    rare = [concept for concept, artists in drawn.items() if artists < MIN_ARTISTS]
    if rare:
        raise SystemExit(f'fewer than {MIN_ARTISTS} artists drew {", ".join(rare)}: choose other concepts')
    print(f'{sum(drawn.values())} sprites of {len(concepts)} concepts in {args.out}')


if __name__ == '__main__':
    main()
