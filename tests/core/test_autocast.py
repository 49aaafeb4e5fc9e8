"""The ambient recipe: what it reaches, how it nests, and that no compiled function goes stale."""

import asyncio
import contextlib
import contextvars
import gc
import random
import sys
import threading
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from tests.cases import OWG, variables_of
