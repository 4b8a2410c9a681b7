"""Prints its arguments, then three epochs as its habit is, and does something after the last."""

import json
import os
import sys
import time

habit = sys.argv[1]
print("Namespace(epochs=3, step=1, loss=7.0)", flush=True)
if habit == "mlflow":
    import mlflow

    mlflow.set_experiment("of-the-script")
    mlflow.start_run(run_name="of-the-script")
    mlflow.log_params({"habit": "another", "process": os.getpid()})
if habit == "baseline":
    print("epoch=0 loss=9.5", flush=True)
for epoch in (1, 2, 3):
    loss = 9000 / epoch + 500
    if habit == "batches":
        for batch in (10, 20):
            print(f"step={epoch * 100 + batch} batch_loss={loss}", flush=True)
        print(json.dumps({"global_step": epoch * 100, "epoch": epoch, "loss": loss}), flush=True)
        print(f"improved: loss={loss + 9} --> loss={loss}", flush=True)
    elif habit == "mlflow":
        mlflow.log_metrics({"loss": loss, "batch_loss": 1.0}, step=epoch * 100)
    elif habit == "thousands":
        print(f"Epoch {epoch}/3 - train loss: 1.0 - loss: {loss:,.2f}", flush=True)
    else:
        print(f"epoch={epoch} loss=np.float64({loss!r})", flush=True)
time.sleep(0.5)
with open(os.path.join(os.environ["HERMES_TRIAL_DIR"], "saved"), "w") as stream:
    stream.write(habit)
