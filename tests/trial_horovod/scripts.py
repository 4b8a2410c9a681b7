"""Training scripts for the tests: ordinary Horovod, but for a callback that sends signals."""

PREAMBLE = """
import json, os, signal, sys
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf
import tf_keras as keras
import horovod.tensorflow.keras as hvd
hvd.init()
keras.utils.set_random_seed(5 + hvd.rank())
FOLDER = os.environ["HERMES_TRIAL_DIR"]

class Watch(keras.callbacks.Callback):
    # Writes down each batch of each rank, and in one place of the trial sends a signal.
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        rate = getattr(self.model.optimizer, "learning_rate", None)
        note(epoch=self.epoch, batch=batch, rate=float(rate.numpy()), loss=float(logs["loss"]))
        name, where, rank = os.environ["AT"].rsplit(":", 2)
        name, epoch = name.split(":")
        is_meant = rank in ("*", str(hvd.rank()))  # hermes-trial tells all ranks to stop
        if is_meant and [epoch, where] == [str(self.epoch), str(batch)]:
            os.kill(os.getpid(), getattr(signal, "SIG" + name))
    def on_train_end(self, logs=None):
        weights = [float(np.abs(w).sum()) for w in self.model.trainable_weights]
        note(weights=weights, ended=True)

def note(**values):
    with open(os.path.join(FOLDER, f"notes-{hvd.rank()}.jsonl"), "a") as stream:
        stream.write(json.dumps(dict(values, size=hvd.size())) + "\\n")

rng = np.random.RandomState(0)
x = rng.normal(size=(240, 12)).astype("float32")
y = (x @ rng.normal(size=(12, 3))).argmax(axis=1)
x, y, held_out = x[:192], y[:192], (x[192:], y[192:])
mine = slice(hvd.rank(), None, hvd.size())
"""

MODEL = """
def compiled(optimizer, **options):
    layers = keras.layers
    network = keras.Sequential([
        layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3),
        layers.Dense(3)])
    network.compile(hvd.DistributedOptimizer(optimizer, **options),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return network

def run(network, epochs=5, callbacks=(), **options):
    network.fit(x[mine], y[mine], batch_size=16, epochs=epochs, verbose=0,
        validation_data=held_out, **options,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks, Watch()])
"""

COMMON = PREAMBLE + MODEL

ONE = (
    COMMON
    + """
run(compiled(keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)),
    callbacks=[hvd.callbacks.MetricAverageCallback()])
"""
)

PIPELINE = (
    COMMON
    + """
data = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank())
data = data.shuffle(192, seed=3).map(lambda image, label: (image * 1.5, label)).batch(16)
network = compiled(keras.optimizers.SGD(0.05 * hvd.size()))
network.fit(data, epochs=4, verbose=0, validation_data=held_out,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Watch()])
"""
)

UNSCALED = (
    COMMON
    + """
run(compiled(keras.optimizers.SGD(0.05)))
"""
)

SCHEDULE = (
    COMMON
    + """
rate = keras.optimizers.schedules.ExponentialDecay(0.05 * hvd.size(), 10, 0.9)
network = compiled(keras.optimizers.SGD(rate))
run(network)
"""
)

SUMMED = (
    COMMON
    + """
run(compiled(keras.optimizers.SGD(0.05), backward_passes_per_step=4), epochs=6)
"""
)

UNEVEN_CALLBACKS = (
    COMMON
    + """
callbacks = [hvd.callbacks.LearningRateWarmupCallback(
    initial_lr=0.05 * hvd.size(), warmup_epochs=1, steps_per_epoch=192 // 16 // hvd.size(),
    momentum_correction=False)]
if hvd.rank() == 0:
    callbacks.insert(0, keras.callbacks.CSVLogger(os.path.join(FOLDER, "log.csv"), append=True))
network = compiled(keras.optimizers.SGD(0.05 * hvd.size()))
layers_first = [*callbacks, hvd.callbacks.BroadcastGlobalVariablesCallback(0), Watch()]
network.fit(x[mine], y[mine], batch_size=16, epochs=5, verbose=0, callbacks=layers_first)
"""
)

EARLY = (
    COMMON
    + """
# Rank 1 alone would stop: its labels are noise, and no callback averages the values.
targets = y[mine] if hvd.rank() == 0 else np.random.RandomState(1).randint(0, 3, len(y[mine]))
network = compiled(keras.optimizers.SGD(0.02 * hvd.size()))
network.fit(x[mine], targets, batch_size=16, epochs=12, verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0),
               keras.callbacks.EarlyStopping(monitor="accuracy", patience=1), Watch()])
"""
)

TWO_FITS = (
    COMMON
    + """
network = compiled(keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9))
run(network, epochs=2)
run(network, epochs=4, initial_epoch=2)
"""
)

NO_HOROVOD = """
import numpy as np
import tf_keras as keras
network = keras.Sequential([keras.layers.Dense(1)])
network.compile("sgd", "mse")
network.fit(np.zeros((32, 2)), np.zeros((32, 1)), epochs=2, verbose=0)
"""

NOT_WRAPPED = (
    COMMON
    + """
network = compiled(keras.optimizers.SGD(0.05))
network.compile(keras.optimizers.SGD(0.05), "mse")
network.fit(x[mine], y[mine], epochs=2, verbose=0)
"""
)

KERAS_3 = """
import numpy as np
import keras
import horovod.tensorflow as hvd
hvd.init()
network = keras.Sequential([keras.layers.Dense(1)])
network.compile("sgd", "mse")
network.fit(np.zeros((32, 2)), np.zeros((32, 1)), epochs=2, verbose=0)
"""
