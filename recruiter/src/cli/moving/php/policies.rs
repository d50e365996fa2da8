//! The retry policies of the library as those of this job system, which have the same names and parameters. What differs: the class has a
//! namespace, the cases of `SelectByException` are a list, and error classes are compared by name here, without their subclasses.

use std::collections::BTreeSet;

use bson::{Bson, Document, doc};
use recruiter_common::{failure::WORKER_DIED, job::StoredPolicy, retry_policy::RetryPolicies};

use super::{super::taking::Reason, Left, malformed, number};

/// The namespace of the library's own policies.
const NAMESPACE: &str = r"Recruiter\RetryPolicy\";

/// The policy, and what is different here. One that is not the library's keeps its class if workers know it.
pub(super) fn translated(policy: &Bson, is_custom_known: bool) -> Result<(StoredPolicy, Option<String>), Left> {
    let mut classes = BTreeSet::new();
    let policy = policy_of(policy, &mut classes).ok_or_else(|| malformed("its `retry_policy` is not of the library's form"))?;
    if let Err(problem) = RetryPolicies::default().check(&policy) {
        let hint = match problem.unknown_class() {
            Some(_) if is_custom_known => return Ok((policy, note(&classes))),
            Some(_) => "; if your workers know it, add --custom-policy",
            None => "",
        };
        return Err((Reason::RetryPolicy, format!("its retry policy has no counterpart: {problem}{hint}")));
    }
    Ok((policy, note(&classes)))
}

fn note(classes: &BTreeSet<String>) -> Option<String> {
    let names = classes.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    (!classes.is_empty()).then(|| {
        format!(
            "the retry policy names exceptions of PHP, {names}: here an error class is compared by its name, without its subclasses, and \
             Exception and Throwable became `*`, every class"
        )
    })
}

/// Collects the classes of exceptions. `None` if the policy is malformed.
fn policy_of(policy: &Bson, classes: &mut BTreeSet<String>) -> Option<StoredPolicy> {
    let policy = policy.as_document()?;
    let (class, parameters) = (policy.get_str("class").ok()?, policy.get("parameters").cloned().unwrap_or_default());
    let Some(class) = class.strip_prefix(NAMESPACE) else { return Some(StoredPolicy { class: class.into(), parameters }) };
    let (class, parameters) = match (class, parameters) {
        ("RetriableExceptionFilter", Bson::Document(mut filter)) => {
            let listed = filter.get_array("retriable_exceptions").ok()?;
            let listed = listed.iter().map(|class| error_class(class, classes)).collect::<Option<Vec<_>>>()?;
            let filtered = policy_of(filter.get("filtered_retry_policy")?, classes)?;
            filter.insert("retriable_exceptions", listed);
            filter.insert("filtered_retry_policy", filtered);
            (class, filter.into())
        }
        ("SelectByException", Bson::Array(cases)) => {
            let cases = cases.iter().map(|case| case_of(case.as_document()?, classes)).collect::<Option<Vec<_>>>()?;
            (class, doc! { "cases": cases }.into())
        }
        // Doubling zero gives zero, which only the policy with a constant wait has here.
        ("ExponentialBackoff", Bson::Document(backoff)) if backoff.get(FIRST).and_then(number) == Some(0.0) => {
            let times = backoff.get("retry_how_many_times").cloned();
            ("RetryManyTimes", doc! { "retry_how_many_times": times, "seconds_to_wait_before_retry": 0 }.into())
        }
        other => other,
    };
    Some(StoredPolicy { class: class.into(), parameters })
}

/// The first wait of `ExponentialBackoff`.
const FIRST: &str = "seconds_to_initially_wait_before_retry";

fn case_of(case: &Document, classes: &mut BTreeSet<String>) -> Option<Document> {
    Some(doc! { "when": [error_class(case.get("when")?, classes)?], "then": policy_of(case.get("then")?, classes)? })
}

/// The error class for a class of exceptions. Every exception of PHP is one of the first two.
fn error_class(class: &Bson, classes: &mut BTreeSet<String>) -> Option<String> {
    let class = class.as_str()?.trim_start_matches('\\');
    classes.insert(class.to_owned());
    Some(match class {
        "Exception" | "Throwable" => "*".to_owned(),
        r"Recruiter\WorkerDiedInTheLineOfDutyException" => WORKER_DIED.to_owned(),
        other => other.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use bson::bson;

    use super::*;

    fn of(class: &str, parameters: Bson) -> Bson {
        bson!({ "class": format!("{NAMESPACE}{class}"), "parameters": parameters })
    }

    #[track_caller]
    fn check(policy: Bson, class: &str, parameters: Bson) -> Option<String> {
        let (policy, note) = translated(&policy, false).unwrap();
        assert_eq!(policy, StoredPolicy { class: class.into(), parameters });
        note
    }

    #[track_caller]
    fn refused(policy: Bson, reason: Reason, words: &str) {
        let (why, text) = translated(&policy, false).unwrap_err();
        assert!(why == reason && text.contains(words), "{why:?}: {text}");
    }

    #[test]
    fn the_librarys_policies_have_the_same_names_and_parameters_here() {
        // An empty array, and a float where the number was calculated, as PHP stores them.
        assert_eq!(check(of("DoNotDoItAgain", bson!([])), "DoNotDoItAgain", bson!([])), None);
        for (class, parameters) in [
            ("RetryManyTimes", bson!({ "retry_how_many_times": 3, "seconds_to_wait_before_retry": 0 })),
            ("RetryForever", bson!({ "seconds_to_wait_before_retry": 60_i64 })),
            ("ExponentialBackoff", bson!({ "retry_how_many_times": 10.0, FIRST: 5 })),
            ("TimeTable", bson!({ "time_table": { "5 minutes ago": "1 minute", "1 hour ago": "5 minutes", "24 hours ago": "1 hour" } })),
        ] {
            assert_eq!(check(of(class, parameters.clone()), class, parameters), None);
        }
        let constant = bson!({ "retry_how_many_times": 4, "seconds_to_wait_before_retry": 0 });
        check(of("ExponentialBackoff", bson!({ "retry_how_many_times": 4, FIRST: 0 })), "RetryManyTimes", constant);
    }

    #[test]
    fn exceptions_become_error_classes_and_are_named() {
        let forever = || bson!({ "seconds_to_wait_before_retry": 1 });
        let ours = |class: &str| bson!({ "class": class, "parameters": forever() });
        let listed = bson!([r"Acme\Busy", "\\Exception", r"Recruiter\WorkerDiedInTheLineOfDutyException"]);
        let filter = bson!({ "retriable_exceptions": listed, "filtered_retry_policy": of("RetryForever", forever()) });
        let note = check(
            of("RetriableExceptionFilter", filter),
            "RetriableExceptionFilter",
            bson!({ "retriable_exceptions": [r"Acme\Busy", "*", "worker-died"], "filtered_retry_policy": ours("RetryForever") }),
        );
        assert!(note.unwrap().contains(r"Acme\Busy, Exception, Recruiter"));
        let cases = bson!([
            { "when": r"Acme\Busy", "then": of("RetryForever", forever()) },
            { "when": "Throwable", "then": of("DoNotDoItAgain", bson!([])) },
        ]);
        check(
            of("SelectByException", cases),
            "SelectByException",
            bson!({ "cases": [
                { "when": [r"Acme\Busy"], "then": ours("RetryForever") },
                { "when": ["*"], "then": { "class": "DoNotDoItAgain", "parameters": [] } },
            ] }),
        );
    }

    #[test]
    fn a_policy_without_a_counterpart_is_refused_with_its_name_unless_workers_know_it() {
        let own = || bson!({ "class": r"Acme\Patience", "parameters": { "days": 3 } });
        refused(own(), Reason::RetryPolicy, r"`Acme\Patience`; the known ones are");
        refused(own(), Reason::RetryPolicy, "--custom-policy");
        let filter = bson!({ "retriable_exceptions": ["Exception"], "filtered_retry_policy": own() });
        refused(of("RetriableExceptionFilter", filter.clone()), Reason::RetryPolicy, r"`Acme\Patience`");
        assert_eq!(translated(&own(), true).unwrap().0.class, r"Acme\Patience");
        assert!(translated(&of("RetriableExceptionFilter", filter), true).unwrap().1.is_some());
        let wrong = of("RetryManyTimes", bson!({ "retry_how_many_times": -1, "seconds_to_wait_before_retry": 1 }));
        refused(wrong.clone(), Reason::RetryPolicy, "`retry_how_many_times` is -1");
        assert!(translated(&wrong, true).is_err(), "workers know it already");
        refused(of("TimeTable", bson!({ "time_table": { "yesterday": "1 minute" } })), Reason::RetryPolicy, "`yesterday`");
        refused(of("RetryForever", bson!({ "seconds_to_wait_before_retry": 1, "added": 1 })), Reason::RetryPolicy, "`added`");
    }

    #[test]
    fn hostile_policies_are_malformed() {
        for policy in [
            Bson::Null,
            bson!([]),
            bson!({ "class": 7 }),
            of("RetriableExceptionFilter", bson!({ "retriable_exceptions": "Exception" })),
            of("RetriableExceptionFilter", bson!({ "retriable_exceptions": [7], "filtered_retry_policy": {} })),
            of("SelectByException", bson!([{ "when": "Exception" }])),
            of("SelectByException", bson!(["x"])),
        ] {
            refused(policy, Reason::Malformed, "not of the library's form");
        }
        let nested = |inner: Bson| bson!({ "retriable_exceptions": ["Exception"], "filtered_retry_policy": inner });
        let deep = (0..100).fold(of("DoNotDoItAgain", bson!([])), |inner, _| of("RetriableExceptionFilter", nested(inner)));
        refused(deep, Reason::RetryPolicy, "nested deeper");
        refused(of("SelectByException", bson!([])), Reason::RetryPolicy, "is empty");
    }
}
