"""Returns once MLflow's database takes connections."""

import os
import time

from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

engine = create_engine(os.environ["MLFLOW_BACKEND_STORE_URI"])
for _ in range(300):
    try:
        engine.connect().close()
        break
    except OperationalError as error:
        print(str(error).splitlines()[0], flush=True)  # noqa: T201 - the log of its pod
        time.sleep(2)
else:
    raise SystemExit("MLflow's database does not answer")
