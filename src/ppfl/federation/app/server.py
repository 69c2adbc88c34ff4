"""What Flower runs at the server. ppfl is installed there."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run over the sites that the grid reaches."""
    from ppfl.federation.flower_app import main as run

    run(grid, context)
