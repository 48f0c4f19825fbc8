"""Dashboard and report: charts of runs as one self-contained page or as a read-only server.

Python decides what is drawn and bounds its size; `static/page.js` draws it with plotly.js, the same in both. The
package claims no attempt, writes nothing to a run's directory, and knows no jax.

- `charts`: bounded, thinned series of a run's metrics, and their charts
- `reader`: runs below a directory or prefix, differences of their specs, and an incremental reader of one run
- `view`: JSON that `page.js` draws
- `report`: HTML pages that no text of a run can break out of, and the report
- `app`: WSGI application, access policy and responses
- `server`: shared reader of all runs, and the server
"""
