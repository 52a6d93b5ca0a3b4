"""Topics in other libraries' terms, by those libraries. Those that bring hundreds of megabytes, or
want older packages than the other tools, are installed by `tests/judges/test_integrations.py`.
"""

import pickle

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tierlog
from tests.fakes.bucket import put_topic
from tierlog.object_store.open import open_store
from tierlog.spark_reader.arrow_dataset import dataset

offset, partition = pc.field("offset"), pc.field("partition")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    url = f"file://{tmp_path_factory.mktemp('bucket')}"
    put_topic(open_store(url), "many", {0: "many-segments-0", 1: "codec-lz4-0"})
    return url


def test_the_parts_of_a_scan_are_all_of_it_in_any_process(url):
    many = dataset("many", store=url, tier="cold", splitBytes="16k").filter(offset < 150)
    for columns, where in ((None, None), (["value"], partition == 1), (["partition"], offset == 3)):
        parts = [pickle.loads(pickle.dumps(part)) for part in many.parts(columns, where)]
        whole = many.to_table(columns=columns, filter=where)
        assert pa.concat_tables([part.to_table() for part in parts]) == whole
    assert len(many.parts()) > 5
    assert many.parts(filter=partition == 9) == []


def test_dask_reads_a_partition_a_split_in_order(url):
    pytest.importorskip("dask.dataframe")
    from tierlog.integrations.dask import read_topics

    given = {"store": url, "tier": "cold", "splitBytes": "16k"}
    frame = read_topics("many", columns=["partition", "offset", "value"], **given)
    every = dataset("many", **given).to_table(columns=["partition", "offset", "value"])
    assert frame.npartitions > 5
    assert str(frame.dtypes["offset"]) == "int64[pyarrow]"
    assert (
        pa.Table.from_pandas(frame.compute(scheduler="threads"), preserve_index=False)
        .select(every.column_names)
        .to_pylist()
        == every.to_pylist()
    )
    few = read_topics("many", filter=(offset < 3) & (partition == 1), **given)
    assert few["offset"].compute(scheduler="sync").tolist() == [0, 1, 2]
    assert len(read_topics("many", filter=offset < 0, **given).compute(scheduler="sync")) == 0


def test_polars_fetches_what_a_query_needs(url):
    polars = pytest.importorskip("polars")
    lazy = tierlog.scan_polars("many", store=url, tier="cold", splitBytes="16k")
    chosen = lazy.filter(polars.col("offset") < 5).select("offset", "value")
    for engine in ("in-memory", "streaming"):
        assert chosen.collect(engine=engine)["offset"].to_list() == [*range(5), *range(5)]
    per_partition = lazy.group_by("partition").agg(polars.len()).sort("partition")
    assert per_partition.collect().rows() == [(0, 177), (1, 260)]
    # Arrow has no sizes of keys: Polars applies them to the rows.
    sized = lazy.filter((polars.col("value").bin.size() > 10) & (polars.col("partition") == 1))
    every = dataset("many", store=url, tier="cold").to_table(filter=partition == 1)
    sizes = [len(value) for value in every["value"].to_pylist() if value is not None]
    assert sized.collect().height == sum(size > 10 for size in sizes)
    assert lazy.head(3).collect()["offset"].to_list() == [0, 1, 2]


def test_ray_has_a_read_task_a_split(url):
    pytest.importorskip("ray.data")
    from tierlog.integrations.ray import Topics

    every = dataset("many", store=url, tier="cold", splitBytes="16k")
    tasks = Topics(every.parts(), every.schema).get_read_tasks(2)
    assert len(tasks) > 5
    found = [block for task in tasks for block in pickle.loads(pickle.dumps(task))()]
    assert pa.concat_tables(found) == every.to_table()
    assert tasks[0].schema == every.schema
    few = every.parts(["offset"], (offset < 3) & (partition == 1))
    (task,) = Topics(few, every.schema).get_read_tasks(2, per_task_row_limit=2)
    assert [block["offset"].to_pylist() for block in task()] == [[0, 1]]


@pytest.mark.soak  # Ray gives its own processes seconds to start, which a busy machine has not
def test_ray_reads_a_topic(url):
    ray = pytest.importorskip("ray")
    from tierlog.integrations.ray import read_topics

    given = {"store": url, "tier": "cold", "splitBytes": "16k"}
    every = dataset("many", **given).to_table(columns=["partition", "offset", "value"])
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    try:
        rows = read_topics("many", columns=every.column_names, **given)
        found = sorted(rows.take_all(), key=lambda row: (row["partition"], row["offset"]))
        assert read_topics("many", filter=offset < 0, **given).count() == 0
    finally:
        ray.shutdown()
    assert found == every.to_pylist()


def test_dbt_queries_a_topic_as_a_source(url, tmp_path):
    runner = pytest.importorskip("dbt.cli.main")
    pytest.importorskip("dbt.adapters.duckdb")
    files = {
        "dbt_project.yml": "{name: topics, profile: topics, model-paths: [models]}",
        "profiles.yml": f"""
topics:
  target: dev
  outputs:
    dev:
      type: duckdb
      path: {tmp_path}/topics.duckdb
      plugins:
        - module: tierlog.integrations.dbt_duckdb
          config: {{tierlog: {{store: "{url}", tier: cold}}}}
""",
        "models/sources.yml": """
sources:
  - name: log
    config: {meta: {plugin: dbt_duckdb}}
    tables: [{name: many}]
""",
        "models/counted.sql": "{{ config(materialized='table') }}"
        """select partition, count(*) as n from {{ source('log', 'many') }} group by 1""",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    places = ["--project-dir", str(tmp_path), "--profiles-dir", str(tmp_path)]
    result = runner.dbtRunner().invoke(["run", *places])
    assert result.success, result.exception or [one.message for one in result.result]
    import duckdb

    with duckdb.connect(f"{tmp_path}/topics.duckdb") as connection:
        found = connection.sql("select * from counted order by 1").fetchall()
    assert found == [(0, 177), (1, 260)]
