"""Runs in pictures: one file that holds everything, or a server that only answers reading. Claims and changes nothing.

Python decides what is drawn and bounds it; `static/page.js` draws it with plotly.js, the same in both. Knows no jax.

- `reduction` a series in bounded memory, thinned so that peaks survive
- `chart`     which numbers of a row are drawn, and where
- `row_feed`  the rows of a run as they come, each read once
- `difference` where the specs of several runs differ
- `reader`    one run, read again and again
- `view`      what is drawn of runs, as JSON
- `document`  HTML that fetches nothing, and that nothing in a run can break out of
- `report`    one page, kept as a file
- `access`    who may look
- `app`       what the server answers
- `discovery` all runs below a directory or prefix
- `watcher`   one reader for all clients
- `source`    the data of the server's pages, read where something has changed
- `serve`     the server
"""
