"""Defines the command of `outrider-cloud`."""

from __future__ import annotations

import typer

from outrider.cloud.server.keys import keys_app
from outrider.cloud.server.options import ServeOptions
from outrider.models.process.command_line import make_app, run_app, takes_options
from outrider.models.process.extras import importing, require_packages

WHAT, EXTRA = "serving", "cloud"

app = make_app("The cloud side of Outrider: the target model behind an HTTP API.")


@app.command()
@takes_options(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a target until SIGTERM or Ctrl-C; a second one ends at once."""
    with importing(WHAT, EXTRA):
        from outrider.cloud.server.serve import serve
    if options.ray:
        require_packages(("ray", "aiohttp"), "--ray", "scale")
        from outrider.cloud.server.replicated import serve_replicas

        return serve_replicas(options)
    code = serve(options)
    if code:
        raise typer.Exit(code)


app.add_typer(keys_app)


def main() -> None:
    """Runs the command line; see `run_app`."""
    run_app(app, what=WHAT, extra=EXTRA)


if __name__ == "__main__":
    main()
