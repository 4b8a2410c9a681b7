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

TEMPORARY = (
    PREAMBLE
    + SEEDED
    + MODEL
    + FIT
    + """
import tempfile
folder = tempfile.TemporaryDirectory()
open(os.path.join(folder.name, "shard"), "w").close()
run(model(), 2)
"""
)

BATCHES = (
    PREAMBLE
    + """
class Count(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, self.batches, flush=True)
    def on_epoch_begin(self, epoch, logs=None):
        self.batches = []
    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)

x, y = data()
size = int(os.environ["BATCH"])
network = keras.Sequential([keras.layers.Dense(3)])
network.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
options = {"batch_size": size}
if os.environ["DATA"] == "pipeline":
    known = tf.data.Dataset.from_tensor_slices((x, y))
    x, y, options = known.filter(lambda image, label: True).batch(size), None, {}
network.fit(x, y, epochs=3, verbose=0, callbacks=[Signal(), Count()], **options)
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
import tempfile
folder = tempfile.mkdtemp(dir=os.environ["HERMES_TRIAL_DIR"])  # a new one at each start
best, log = folder + "/best.weights.h5", folder + "/log.csv"
network = model(rate=0.05)
run(network, 8, callbacks=[
    keras.callbacks.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
    keras.callbacks.CSVLogger(log),
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.05),
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: float(rate) * 0.95),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=3)])
network.load_weights(best)
print("best", [round(float(np.abs(w).sum()), 4) for w in network.get_weights()],
    sum(1 for _ in open(log)), flush=True)
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

LOOPS = (
    PREAMBLE
    + SEEDED
    + MODEL
    + """
x, y = data()
def fit(network, epochs, **options):
    options.setdefault("callbacks", [])
    network.fit(x[:128], y[:128], batch_size=32, epochs=epochs, verbose=0,
        **dict(options, callbacks=options["callbacks"] + [Signal()]))
    Signal.fit_number += 1
first, second = model(rate=0.01), model()
for turn in range(9):
    order = np.random.permutation(128)
    first.fit(x[order], y[order], batch_size=32, epochs=1, verbose=0, callbacks=[Signal()])
    Signal.fit_number += 1
    second.train_on_batch(x[:32], y[:32])
    fit(second, turn + 1, initial_epoch=turn)
    loss, accuracy = first.evaluate(x[128:], y[128:], verbose=0)
    if loss > 0.9:
        first.optimizer.learning_rate = 0.02
    print("between", turn, round(loss, 5), round(float(second.predict(x, verbose=0).sum()), 3),
        flush=True)
for fold in range(3):
    network = model()
    stopping = keras.callbacks.EarlyStopping(monitor="loss", min_delta=0.2, patience=1)
    fit(network, 4, callbacks=[stopping])
    print("fold", fold, network.stop_training, stopping.stopped_epoch, round(stopping.best, 5),
        flush=True)
"""
)

PIPELINES = (
    PREAMBLE
    + SEEDED
    + """
x, y = data()
images = np.repeat(x.reshape(-1, 3, 4, 1), 2, axis=1)
move = keras.layers.RandomTranslation(0.4, 0.4)
count = tf.Variable(0.0)
def moved(image, label):
    count.assign_add(0.01)
    return move(image, training=True) + count, label
def flipped(image, label):
    return tf.image.random_flip_left_right(image, seed=3), label
slices = tf.data.Dataset.from_tensor_slices((images[:128], y[:128]))
cached = slices.shuffle(128).map(flipped).cache().batch(16).map(moved)
endless = slices.shuffle(64, seed=4).repeat().batch(16).map(moved).prefetch(3)
shift = keras.layers.RandomTranslation(0.1, 0.1)
test = tf.data.Dataset.from_tensor_slices((images[128:], y[128:]))
shifted = test.batch(8).map(lambda image, label: (shift(image, training=True), label))
part = test.shuffle(32, seed=5).batch(8)
layers = keras.layers
network = keras.Sequential([layers.Flatten(), layers.Dropout(0.2), layers.Dense(3)])
network.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
for train, options in (
    (cached, {"validation_data": shifted}),
    (endless, {"validation_data": part, "validation_steps": 3, "steps_per_epoch": 6}),
):
    history = network.fit(train, epochs=4, verbose=0, callbacks=[Signal()], **options)
    Signal.fit_number += 1
    print("history", [round(float(v), 6) for v in history.history["val_loss"]], flush=True)
print("weights", [round(float(np.abs(w).sum()), 4) for w in network.get_weights()], flush=True)
"""
)

STAGES = (
    PREAMBLE
    + SEEDED
    + MODEL
    + """
x, y = data()
slices = tf.data.Dataset.from_tensor_slices((x, y))
train = slices.take(128).shuffle(128, seed=1).batch(16)
test = slices.skip(64).shuffle(96, seed=2).batch(16).take(3)
network = model()
for epochs in (2, 3):
    history = network.fit(train, epochs=epochs, verbose=0, validation_data=test,
        callbacks=[Signal()])
    Signal.fit_number += 1
    print("history", [round(float(v), 5) for v in history.history["val_loss"]],
        round(network.evaluate(test, verbose=0)[0], 5), flush=True)
"""
)

HIDDEN = (
    PREAMBLE
    + SEEDED
    + """
import random
x, y = data()
count, draws = tf.Variable(0.0), tf.random.Generator.from_seed(3)
entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
def loss(true, predicted):
    count.assign_add(1.0)
    looked_up = tf.reshape(table.lookup(tf.constant([1], tf.int64)), [])
    table.insert([1], [looked_up + 0.01])
    return entropy(true, predicted) * (1 + draws.uniform([]) / count) + looked_up
class Calls(keras.metrics.Metric):
    def __init__(self, **options):
        super().__init__(**options)
        self.total = self.add_weight(name="total", initializer="zeros")
    def update_state(self, true, predicted, sample_weight=None):
        self.total.assign_add(1.0)
    def result(self):
        return self.total + count
class Meter:
    def __init__(self):
        self.values = []
        self.sum = 0.0
    def add(self, value):
        self.values.append(value)
        self.sum += value
seen, turns, chance = [], 0, np.random.default_rng(1)
teacher = keras.Sequential([keras.Input((12,)), keras.layers.Dense(2)])
class Own(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.meter, self.order, self.teacher = Meter(), random.Random(2), teacher
    def on_epoch_end(self, epoch, logs=None):
        global turns
        turns += 1
        self.meter.add(round(logs["loss"], 5))
        rate = 0.02 * chance.uniform() + 0.01 * self.order.random()
        self.model.optimizer.learning_rate.assign(rate)
        self.teacher.set_weights([w + turns for w in self.teacher.get_weights()])
normal = keras.layers.Normalization()
normal.adapt(x)
shared = keras.layers.Dense(12, activation="relu")
inputs = keras.Input((12,))
hidden = shared(keras.layers.BatchNormalization()(shared(normal(inputs))))
network = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dropout(0.2)(hidden)))
network.compile(keras.optimizers.Adam(0.02, use_ema=True, ema_overwrite_frequency=7), loss,
    metrics=[Calls()])
own = Own()
history = network.fit(x[:128], y[:128], validation_data=(x[128:], y[128:]), batch_size=16,
    epochs=5, verbose=0, callbacks=[own, Signal(), keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(round(float(logs["val_loss"]), 5)))])
print("history", seen, turns, own.meter.values, round(own.meter.sum, 4), chance.random(),
    round(float(count.numpy()), 3), table.lookup(tf.constant([1], tf.int64)).numpy(), flush=True)
print("weights", [round(float(np.abs(w).sum()), 4)
    for w in network.get_weights() + teacher.get_weights()], flush=True)
"""
)

FILES = (
    PREAMBLE
    + SEEDED
    + MODEL
    + """
import glob, importlib.util, json
x, y = data()
where = os.path.join(os.environ["HERMES_TRIAL_DIR"], "written")
os.makedirs(where, exist_ok=True)
script_log = open(where + "/script.log", "w")
class Header(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.log = open(where + "/open.log", "w")
        self.log.write("epoch loss\\n")
        with open(where + "/closed.log", "w") as log:
            log.write("epoch loss\\n")
    def on_epoch_end(self, epoch, logs=None):
        line = f"{epoch} {logs['loss']:.5f}\\n"
        self.log.write(line)
        script_log.write(line)
        with open(where + "/closed.log", "a") as log:
            log.write(line)
    def on_train_end(self, logs=None):
        self.log.close()
class Die(keras.callbacks.Callback):
    # Once: after the others have written an epoch's lines, before its checkpoint.
    def on_epoch_end(self, epoch, logs=None):
        marker = os.path.join(os.environ["HERMES_TRIAL_DIR"], "died")
        if os.environ.get("DIE") == str(epoch) and not os.path.exists(marker):
            open(marker, "w").close()
            for writer in getattr(board[0], "_writers", {}).values() if board else ():
                writer.flush()
            script_log.flush()
            os.kill(os.getpid(), signal.SIGKILL)
board = []
if importlib.util.find_spec("tensorboard"):
    board = [keras.callbacks.TensorBoard(where + "/board", update_freq=2)]
for number in range(2):
    network = model(rate=0.03)
    network.fit(x[:128], y[:128], validation_data=(x[128:], y[128:]), batch_size=16, epochs=5,
        verbose=0, callbacks=[
            keras.callbacks.CSVLogger(where + "/log.csv", append=number > 0),
            keras.callbacks.ModelCheckpoint(where + "/best.weights.h5", monitor="val_accuracy",
                mode="max", save_best_only=True, save_weights_only=True),
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=3,
                restore_best_weights=True),
            Header(), *board, Signal(), Die()])
    Signal.fit_number += 1
    network.load_weights(where + "/best.weights.h5")
    print("weights", [round(float(np.abs(w).sum()), 4) for w in network.get_weights()], flush=True)
    print("rows", sum(1 for _ in open(where + "/log.csv")), flush=True)
script_log.close()
for name in sorted(os.listdir(where)):
    if name.endswith((".csv", ".log")):
        print("file", name, repr(open(os.path.join(where, name)).read()), flush=True)
scalars = []
for path in glob.glob(where + "/board/*/*"):
    for event in tf.compat.v1.train.summary_iterator(path):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars" or "loss" in value.tag:
                scalars.append((os.path.basename(os.path.dirname(path)), value.tag, event.step,
                    round(float(tf.make_ndarray(value.tensor)), 4)))
print("scalars", len(scalars), sorted(scalars), flush=True)
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
cache = os.path.join(os.environ["HERMES_TRIAL_DIR"], "cache")
train = tf.data.Dataset.from_tensor_slices((x[:128], y[:128])).batch(16).cache(cache)
train = train.shuffle(4).prefetch(2)
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

OWN_LOOP = (
    PREAMBLE
    + """
x, y = data()
network = keras.Sequential([keras.Input((12,)), keras.layers.Dense(3)])
entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(0.1)
network.compile(optimizer, entropy)
@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = entropy(y, network(x, training=True))
    gradients = tape.gradient(loss, network.trainable_variables)
    optimizer.apply_gradients(zip(gradients, network.trainable_variables))
    return loss
for epoch in range(1, 4):
    loss = network.train_on_batch(x, y) if os.environ["LOOP"] == "train_on_batch" else step(x, y)
    print(f"epoch={epoch} loss={float(loss):.5f}", flush=True)
"""
)

BACKENDS = (
    PREAMBLE.replace("import tensorflow as tf\n", "")
    + """
keras.utils.set_random_seed(5)
x, y = data()
layers, seen, chance = keras.layers, [], np.random.default_rng(3)
class Order(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.order = np.random.permutation(128)
    def __len__(self):
        return 8
    def __getitem__(self, index):
        rows = self.order[16 * index:16 * index + 16]
        return x[rows], y[rows]
    def on_epoch_end(self):
        np.random.shuffle(self.order)
network = keras.Sequential([layers.Dense(16, activation="relu"), layers.BatchNormalization(),
    layers.Dropout(0.3), layers.Dense(3)])
network.compile(keras.optimizers.Adam(0.02, use_ema=True),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
log = os.path.join(os.environ["HERMES_TRIAL_DIR"], "log.csv")
for arguments in ((x[:128], y[:128]), (Order(),), (x[:128], y[:128])):
    history = network.fit(*arguments, validation_data=(x[128:], y[128:]), batch_size=None if
        len(arguments) == 1 else 16, epochs=4, verbose=0, callbacks=[keras.callbacks.CSVLogger(log),
        keras.callbacks.ReduceLROnPlateau(patience=1), keras.callbacks.EarlyStopping(patience=3,
            restore_best_weights=True), Signal(), keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(round(float(chance.random()), 6)))])
    Signal.fit_number += 1
    order = np.random.permutation(128)
    print("between", round(network.evaluate(x[order], y[order], verbose=0)[0], 5), order[:4],
        round(float(network.predict(x, verbose=0).sum()), 3), flush=True)
print("history", seen, repr(open(log).read()), flush=True)
print("weights", keras.backend.backend(), [round(float(np.abs(w).sum()), 4)
    for w in network.get_weights()], flush=True)
"""
)

# Files in another order in each epoch, and their lines mixed; in two rounds if ROUNDS is set.
STACKED = (
    PREAMBLE
    + SEEDED
    + MODEL
    + """
x, y = data()
def pipeline(first, last):
    count = (last - first) // 4
    shards = tf.data.Dataset.range(4).shuffle(4, seed=1)
    def rows(shard):
        begin = first + tf.cast(shard, tf.int32) * count
        return tf.data.Dataset.from_tensor_slices((x, y)).skip(
            tf.cast(begin, tf.int64)).take(count)
    lines = shards.interleave(rows, cycle_length=2, num_parallel_calls=2).shuffle(8, seed=2)
    return lines.repeat(2) if os.environ.get("ROUNDS") else lines
network = model()
network.fit(pipeline(0, 128).batch(16), validation_data=pipeline(128, 160).batch(8), epochs=5,
    verbose=0, callbacks=[Signal()])
"""
)
