"""The style of the report's page: light and dark, on a phone, on a desk and on paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fdfcf9; --ink: #1c222b; --muted: #5a6472; --line: #dedad0; --tint: #f3f0e7; --accent: #0b5f91; --warn: #a33b00;
  --text: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
  --heading: Charter, "Iowan Old Style", "Bitstream Charter", Cambria, Georgia, serif;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --ink: #e7e4dc; --muted: #a2abb7; --line: #363e48; --tint: #1d242c; --accent: #82c4ee; --warn: #ffa36b;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.6 var(--text); }
header, main, footer { max-width: 74rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 3.5rem; }
footer { padding-bottom: 4rem; }
h1, h2, h3 { font-family: var(--heading); font-weight: 600; line-height: 1.2; text-wrap: balance; }
h1 { font-size: 2.6rem; margin: 0 0 .75rem; letter-spacing: -.01em; }
h2 { font-size: 1.6rem; margin: 4rem 0 .75rem; padding-top: 1.25rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p, dl, ul { max-width: 44rem; margin: .75rem 0; }
.lead { font-size: 1.15rem; color: var(--muted); max-width: 40rem; }
a { color: var(--accent); text-underline-offset: .15em; }
code { font: .85em/1.4 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; background: var(--tint);
  border-radius: .25em; padding: .1em .35em; overflow-wrap: anywhere; }
nav { margin: 1.5rem 0 0; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .4rem 1.4rem; padding: 0; margin: 0; max-width: none; }
.glance { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: 1px; max-width: none; margin: 2rem 0;
  background: var(--line); border: 1px solid var(--line); border-radius: .5rem; overflow: hidden; }
.glance div { background: var(--page); padding: 1rem 1.15rem;
  display: flex; flex-direction: column-reverse; justify-content: flex-end; }
.glance dd { margin: 0; font: 600 1.7rem/1.25 var(--heading); font-variant-numeric: tabular-nums lining-nums; }
.glance dt { color: var(--muted); font-size: .88rem; line-height: 1.45; }
.legend { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; }
.legend dt { font-weight: 600; white-space: nowrap; }
.legend dd { margin: 0; }
figure { margin: 1.5rem 0; }
figure .scroll { padding: .5rem 0; }
figure svg { display: block; width: 100%; min-width: 36rem; max-width: 60rem; height: auto; font-family: var(--text); }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption, .note { color: var(--muted); font-size: .9rem; line-height: 1.5; max-width: 48rem; }
.scroll { overflow-x: auto; margin: 1.25rem 0 .75rem; }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; }
table { border-collapse: collapse; font-size: .86rem; line-height: 1.35; font-variant-numeric: tabular-nums lining-nums; }
caption { text-align: left; font-weight: 600; padding: .25rem 0 .6rem; font-size: .95rem;
  max-width: min(48rem, 100vw - 2.5rem); }
th, td { padding: .42rem .6rem; vertical-align: baseline; text-align: left; }
thead th { font-weight: 600; vertical-align: bottom; border-bottom: 1px solid var(--ink); }
thead th.group { border-bottom: 1px solid var(--line); color: var(--muted); font-weight: 500; text-align: left; }
thead small { display: block; font-weight: 400; color: var(--muted); font-size: .78rem; }
tbody tr { border-bottom: 1px solid var(--line); }
tbody th { font-weight: 500; position: sticky; left: 0; background: var(--page); min-width: 7.5rem; }
.number { text-align: right; white-space: nowrap; }
thead .number { white-space: normal; min-width: 3.9rem; }
.words code { white-space: normal; }
td.words { min-width: 6rem; }
#plans td.words:last-child { min-width: 26rem; }
td[colspan] { color: var(--muted); }
td strong { color: var(--warn); font-weight: 600; }
.here { background: var(--tint); }
@media (max-width: 40rem) {
  header { padding-top: 2rem; }
  h1 { font-size: 1.9rem; }
  h2 { margin-top: 3rem; }
  th, td { padding: .38rem .5rem; }
  tbody th { min-width: 6rem; }
}
@media print {
  @page { size: A4; margin: 14mm; }
  :root { --page: #fff; --ink: #000; --muted: #444; --line: #bbb; --tint: #f2f2f2; --accent: #000; --warn: #000; }
  html { font-size: 9.5pt; }
  header, main, footer { max-width: none; padding: 0; }
  nav { display: none; }
  h2 { margin-top: 1.5rem; break-after: avoid; }
  h3, caption { break-after: avoid; }
  figure, tr, .glance { break-inside: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; }
  figure svg { min-width: 0; max-width: 17cm; }
  table { font-size: 7pt; width: 100%; }
  th, td { padding: .2rem .3rem; }
  tbody th, thead .number, td.words, #plans td.words:last-child { position: static; min-width: 0; }
  .number { white-space: normal; }
}
"""
