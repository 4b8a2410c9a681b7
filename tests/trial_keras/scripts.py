"""Training scripts for the tests: ordinary Keras, but for a callback that sends itself a signal."""

PREAMBLE = """
import os, signal, sys
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf
import keras

class Signal(keras.callbacks.Callback):
    # In the first process only: a signal to itself at a batch of an epoch.
    def __init__(self):
        super().__init__()
        self.fits = 0
        self.epoch = 0
    def on_train_begin(self, logs=None):
        self.fits += 1
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        at = os.environ.get("AT", "")
        name = "TERM" if at.startswith("TERM") else "KILL"
        where = at[5:]
        marker = os.path.join(os.environ["HERMES_TRIAL_DIR"], "signalled-" + where)
        if where == f"{Signal.fit_number}:{self.epoch}:{batch}" and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), getattr(signal, "SIG" + name))
Signal.fit_number = 0

def data(n=160):
    rng = np.random.RandomState(0)
    x = rng.normal(size=(n, 12)).astype("float32")
    y = (x @ rng.normal(size=(12, 3))).argmax(axis=1)
    return x, y
"""

SEEDED = """
keras.utils.set_random_seed(5)
tf.config.experimental.enable_op_determinism()
"""

MODEL = """
def model(**options):
    layers = keras.layers
    network = keras.Sequential([
        layers.Dense(16, activation="relu"), layers.Dropout(0.3), layers.Dense(3)])
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 10, 0.9)
    network.compile(keras.optimizers.Adam(options.pop("rate", schedule)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
        **options)
    return network
"""

FIT = """
x, y = data()
def run(network, epochs, **options):
    options.setdefault("callbacks", [])
    history = network.fit(x[:128], y[:128], validation_data=(x[128:], y[128:]), batch_size=16,
        epochs=epochs, verbose=0, **dict(options, callbacks=options["callbacks"] + [Signal()]))
    Signal.fit_number += 1
    print("history", sorted((k, [round(float(v), 6) for v in vs])
        for k, vs in history.history.items()), flush=True)
    print("weights", [round(float(np.abs(w).sum()), 4) for w in network.get_weights()], flush=True)
"""

ONE = (
    PREAMBLE
    + SEEDED
    + MODEL
    + FIT
    + """
run(model(), 6, callbacks=[keras.callbacks.EarlyStopping(
    monitor="val_accuracy", mode="max", patience=2, restore_best_weights=True)])
"""
)

BACKUP = (
    PREAMBLE
    + SEEDED
    + MODEL
    + FIT
    + """
import tempfile
class Leave(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3 and os.environ.get("LEAVE"):
            os._exit(9)
class Backup(keras.callbacks.BackupAndRestore):
    pass  # a script's own kind of it
folder = os.environ.get("BACKUP") or tempfile.mkdtemp()
network = model()
network.build((None, 12))
run(network, 5, callbacks=[Backup(folder), Leave()])
"""
)

DIES = (
    PREAMBLE
    + SEEDED
    + MODEL
    + FIT
    + """
import threading
class Die(keras.callbacks.Callback):
    # In the first process only: dies once the last epoch's checkpoint is written.
    def on_train_end(self, logs=None):
        if os.environ.get("AT"):
            for thread in threading.enumerate():
                if thread.name == "hermes-checkpoint":
                    thread.join()
            os.kill(os.getpid(), signal.SIGKILL)
run(model(), 6, callbacks=[keras.callbacks.EarlyStopping(
    monitor="val_loss", mode="max", patience=2, restore_best_weights=True), Die()])
"""
)

CALLBACKS = (
    PREAMBLE
    + SEEDED
    + MODEL
    + FIT
    + """
run(model(rate=0.05), 8, callbacks=[
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.05),
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: float(rate) * 0.95),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=3)])
"""
)

TWO_FITS = (
    PREAMBLE
    + SEEDED
    + MODEL
    + FIT
    + """
network = model()
run(network, 3)
print("between", np.random.rand(), flush=True)
other = model()
run(other, 2)
run(network, 3)
"""
)

ENDING = (
    PREAMBLE
    + SEEDED
    + MODEL
    + FIT
    + """
import time
run(model(), 3)
if os.environ.get("AT") == "after":
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(float(os.environ.get("ENDING_S", "0.2")))
print("over", flush=True)
"""
)

TEARDOWN = (
    PREAMBLE
    + SEEDED
    + MODEL
    + FIT
    + """
class Slow:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM, write=os.write):
        kill(pid, number)
        write(1, b"gone\\n")
sys.slow = Slow()
run(model(), 3)
"""
)

UNSEEDED = (
    PREAMBLE
    + MODEL
    + """
x = np.arange(128, dtype="float32").reshape(-1, 1)
seen = open(os.path.join(os.environ["HERMES_TRIAL_DIR"], "seen"), "a")
class Record(keras.layers.Layer):
    def call(self, inputs):
        def note(values):
            seen.write(" ".join(str(int(v)) for v in values.ravel()) + "\\n")
            seen.flush()
            return values
        out = tf.numpy_function(note, [inputs], tf.float32)
        out.set_shape(inputs.shape)
        return out
network = keras.Sequential([keras.Input((1,)), Record(), keras.layers.Dense(1)])
network.compile("sgd", "mse", jit_compile=False)
network.optimizer.learning_rate = 1e-9
network.fit(x, x, batch_size=16, epochs=3, verbose=0, callbacks=[Signal()])
"""
)

DATASET = (
    PREAMBLE
    + SEEDED
    + MODEL
    + """
x, y = data()
train = tf.data.Dataset.from_tensor_slices((x[:128], y[:128])).shuffle(128).batch(16).prefetch(2)
history = model().fit(train, validation_data=(x[128:], y[128:]), epochs=5, verbose=0,
    callbacks=[Signal()])
"""
)

GENERATOR = (
    PREAMBLE
    + SEEDED
    + MODEL
    + """
x, y = data()
def batches():
    while True:
        for start in range(0, 128, 16):
            yield x[start:start + 16], y[start:start + 16]
model().fit(batches(), steps_per_epoch=8, epochs=4, verbose=0, callbacks=[Signal()])
"""
)

DIVERGING = (
    PREAMBLE
    + SEEDED
    + MODEL
    + FIT
    + """
network = model(rate=1e30)
run(network, 4)
"""
)
