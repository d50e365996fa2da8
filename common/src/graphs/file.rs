//! A graph as JSON, with names in place of ids.
//!
//! ```
//! # use recruiter_common::{graphs::Graph, spec::{Classes, UnknownPolicies}};
//! let text = r#"{"jobs": {
//!     "fetch":   {"class": "fetch", "parameters": {"url": "a"}},
//!     "index":   {"class": "index", "waits_for": ["fetch"]},
//!     "clean up": {"class": "clean-up", "waits_for": [{"job": "index", "when": "ended"}]}
//! }}"#;
//! let (graph, names) = Graph::of_json(text, &Classes::new(), UnknownPolicies::Refuse)?;
//! assert_eq!((graph.len(), names[1].0.as_str()), (3, "fetch"));
//! # Ok::<(), recruiter_common::spec::InvalidSpec>(())
//! ```

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize,
    de::{Deserializer, Error, MapAccess, Visitor},
};
use serde_json::{Value, json};

use super::Graph;
use crate::{
    base::JobId,
    enqueue::{
        classes::Classes,
        spec::{InvalidSpec, JobSpec, UnknownPolicies},
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// By name, in the order of names.
    #[serde(deserialize_with = "distinct")]
    jobs: BTreeMap<String, Value>,
}

/// The jobs by name. A name that occurs twice is refused: one of the two jobs would be lost.
fn distinct<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, Value>, D::Error> {
    struct Jobs;

    impl<'de> Visitor<'de> for Jobs {
        type Value = BTreeMap<String, Value>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object of jobs, by their names")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut jobs = BTreeMap::new();
            while let Some((name, job)) = map.next_entry::<String, Value>()? {
                if jobs.contains_key(&name) {
                    return Err(A::Error::custom(format!("the job {name:.80?} occurs twice: give each job a name of its own")));
                }
                jobs.insert(name, job);
            }
            Ok(jobs)
        }
    }

    from.deserialize_map(Jobs)
}

impl Graph {
    /// The graph in a JSON text: `{"jobs": {name: job}}`. In `waits_for` a job names other jobs of the text, or has their ids. Jobs get
    /// the defaults of their classes. Returns the graph, and the names of its jobs with their ids.
    ///
    /// # Errors
    /// When the text is not a graph. The message names the job.
    pub fn of_json(text: &str, classes: &Classes, unknown_policies: UnknownPolicies) -> Result<(Self, Vec<(String, JobId)>), InvalidSpec> {
        let file: File = crate::base::json::parse(text).map_err(|error| {
            InvalidSpec::of_text(format!(r#"a graph is a JSON object like {{"jobs": {{"a": {{"class": "c"}}}}}}: {error}"#))
        })?;
        let ids: BTreeMap<&str, JobId> = file.jobs.keys().map(|name| (name.as_str(), JobId::new())).collect();
        let mut graph = Self::new();
        for (name, job) in &file.jobs {
            let of_job = |problem: &dyn fmt::Display| InvalidSpec::of_text(format!("job {name:.80?}: {problem}"));
            if job.get("id").is_some_and(|id| !id.is_null()) {
                return Err(of_job(&"leave out its `id`: the jobs of a graph get their ids when it is enqueued"));
            }
            if let Some(unknown) = unknown_parent(job, &ids) {
                return Err(of_job(&format!("it waits for {unknown:.80?}, which is neither a job of this graph nor the id of a job")));
            }
            let spec: JobSpec = serde_json::from_value(with_ids(job.clone(), &ids)).map_err(|error| of_job(&error))?;
            let job = spec.with_defaults(classes).into_job(unknown_policies).map_err(|problem| of_job(&problem))?;
            graph.add(job.made_as(ids[name.as_str()]));
        }
        Ok((graph, ids.iter().map(|(name, id)| ((*name).to_owned(), *id)).collect()))
    }
}

/// A name in `waits_for` that no job of the file has.
fn unknown_parent<'a>(job: &'a Value, ids: &BTreeMap<&str, JobId>) -> Option<&'a str> {
    let edges = job.get("waits_for").and_then(Value::as_array).into_iter().flatten();
    let mut parents = edges.filter_map(|edge| edge.as_str().or_else(|| edge.get("job")?.as_str()));
    parents.find(|parent| !ids.contains_key(parent) && parent.parse::<JobId>().is_err())
}

/// The job with ids in place of the names in `waits_for`.
fn with_ids(mut job: Value, ids: &BTreeMap<&str, JobId>) -> Value {
    let id = |name: &Value| name.as_str().and_then(|name| ids.get(name)).map(|id| json!(id.to_string()));
    for edge in job.get_mut("waits_for").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(id) = id(edge) {
            *edge = id;
        } else if let Some(parent) = edge.get_mut("job")
            && let Some(id) = id(parent)
        {
            *parent = id;
        }
    }
    job
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_ids_and_a_problem_names_its_job() {
        let check = |text: &str| {
            Graph::of_json(text, &Classes::new(), UnknownPolicies::Refuse).map(|(graph, _)| graph.len()).map_err(|error| error.to_string())
        };
        assert_eq!(
            check(r#"{"jobs": {"a": {"class": "c"}, "b": {"class": "c", "waits_for": ["a", {"job": "a", "when": "failed"}]}}}"#),
            Ok(2)
        );
        assert_eq!(check(r#"{"jobs": {}}"#), Ok(0));
        for (wrong, part) in [
            ("[]", "a graph is a JSON object"),
            (r#"{"jobs": []}"#, "an object of jobs, by their names"),
            (r#"{"jobs": {"a": {"class": "c"}, "a": {"class": "d"}}}"#, "the job \"a\" occurs twice"),
            (r#"{"jobs": {"a": {}}}"#, "job \"a\": `class` is missing"),
            (r#"{"jobs": {"a": {"class": "c", "id": "65a1b2c3d4e5f60718293a4b"}}}"#, "job \"a\": leave out its `id`"),
            (
                r#"{"jobs": {"a": {"class": "c", "waits_for": ["b"]}}}"#,
                "job \"a\": it waits for \"b\", which is neither a job of this graph",
            ),
            (r#"{"jobs": {"a": {"class": "c", "waits_for": [{"job": "a", "when": "never"}]}}}"#, "`done`, `ended` or `failed`"),
            (r#"{"jobs": {"a": {"class": "c", "wait": 1}}}"#, "job \"a\": unknown field `wait`"),
        ] {
            assert!(check(wrong).is_err_and(|problem| problem.contains(part)), "{wrong}: {:?}", check(wrong));
        }
    }
}
