"""Dashboard and report: charts of runs as one self-contained page or as a read-only server.

Python selects the content of a page and bounds its size; `static/page.js`, which both share, draws it with plotly.js.
The package claims no attempt, writes nothing to a run's directory, and does not import jax.

- `charts`: bounded, thinned series of a run's metrics, and their charts
- `reader`: runs below a directory or prefix, differences of their specs, and an incremental reader of one run
- `view`: JSON that `page.js` draws
- `sweep`: likewise, of the page of a sweep
- `report`: HTML pages that no text of a run can break out of, and the report
- `app`: WSGI application, access policy and responses
- `server`: shared reader of all runs, and the server
"""
