"""Runs in pictures: one file that holds everything, or a server that only answers reading. Claims and changes nothing.

Python decides what is drawn and bounds it; `static/page.js` draws it with plotly.js, the same in both. Knows no jax.

- `charts`: A series of any length in bounded memory, thinned so that every peak survives: the lowest and highes
- `discovery`: All runs below a directory or a bucket's prefix. A run is a directory with a `job.json`, and holds n
- `html`: HTML that holds everything and fetches nothing, and that a run's name, spec or log cannot break out
- `app`: What the dashboard answers, as a WSGI application: pages, their data, three static files. It can onl
- `reader`: One run as it is read for a page, again and again where it lives: its history, its rows, its log. Wr
- `view`: What `page.js` draws of runs, as JSON of bounded size: texts, and numbers with as many digits as an
- `report`: One self-contained page about one run or several, as they stand now
- `server`: The data of the dashboard's pages, read anew only where something has changed: the table of all runs
"""
