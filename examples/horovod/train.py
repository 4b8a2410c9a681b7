"""Train a small convolutional network on handwritten digits with Horovod, on any number of GPUs.

An ordinary script for `horovodrun -np 2 python train.py`: each worker trains on its share of the
data, and the learning rate grows with the number of workers.
"""

import argparse
import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Horovod averages the gradients of Keras 2 only

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
import tf_keras as keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--filters", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one worker")
    parser.add_argument("--epochs", type=int, default=20)
    return parser.parse_args()


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    images = np.kron(images, np.ones((1, 2, 2, 1), dtype="float32"))  # 16 x 16 pixels
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=0.25, random_state=0, stratify=labels
    )
    count = len(x_train) // hvd.size() * hvd.size()  # all workers make as many steps
    mine = slice(hvd.rank(), count, hvd.size())
    return x_train[mine], y_train[mine], (x_test, y_test)


def build_model(filters, dropout):
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            keras.layers.Conv2D(filters, 3, activation="relu", padding="same"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(2 * filters, 3, activation="relu", padding="same"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(10),
        ]
    )


def main():
    arguments = parse_arguments()
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    keras.utils.set_random_seed(1 + hvd.rank())
    x_train, y_train, test = load_data()
    model = build_model(arguments.filters, arguments.dropout)
    optimizer = keras.optimizers.SGD(arguments.learning_rate * hvd.size(), momentum=0.9)
    model.compile(
        hvd.DistributedOptimizer(optimizer),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        x_train,
        y_train,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation_data=test,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ],
        verbose=2 if hvd.rank() == 0 else 0,
    )


if __name__ == "__main__":
    main()
