//! The validators: the contract for programs in other languages.

use bson::{Bson, Document, doc, spec::ElementType};

use super::{LARGEST_CAPACITY, LARGEST_KEY, LARGEST_WORKABLE, MOST_MISSED, MOST_WINDOWS, indexes::any_line};
use crate::{
    base::{DUE_MS, never_due},
    job::{
        MOST_ITEMS,
        settings::{IN_JOBS, IN_TEMPLATES},
    },
};

/// The contract for enqueuers in other languages. It refuses every type that a worker cannot decode, so that no job is
/// archived without a run although it could have been refused. Fields that Recruiter does not define are not checked.
///
/// The rules for waiting jobs come first, because MongoDB reports a refusal in this order. Locked jobs are not checked:
/// they were checked when they were inserted, a start writes only valid values, and checking costs time.
pub(crate) fn scheduled_validator() -> Document {
    let held = doc! {
        "locked": true,
        "last_execution.start": { "$type": "objectId" },
        "last_execution.worker": { "$type": "objectId" },
    };
    doc! { "$or": [waiting_job(), held] }
}

fn waiting_job() -> Document {
    doc! {
        // Checked first: a locked job needs no further check.
        "locked": { "$ne": true },
        "$jsonSchema": {
            "required": ["_id", "locked", "group", "priority", "scheduled_at", "workable"],
            "properties": job_properties(),
        },
        "$and": [
            // The place in a line.
            { "$or": [{ "gate": { "$not": any_line() } }, { "created_at": { "$type": "date" } }] },
            // A job that waits is not due.
            { "$or": [
                { "waiting": Bson::Null },
                { "scheduled_at": never_due(), "gate": { "$not": any_line() }, "unique_after": Bson::Null },
            ] },
        ],
        "scheduled_at": { "$gte": bson::DateTime::from_millis(*DUE_MS.start()), "$lte": never_due() },
        "$expr": { "$or": [
            { "$ne": [{ "$type": "$workable" }, "object"] },
            { "$lte": [{ "$bsonSize": "$workable" }, i64::try_from(LARGEST_WORKABLE).unwrap_or(i64::MAX)] },
        ] },
    }
}

/// The fields of a job, in parts, because the macro nests once for each value.
fn job_properties() -> Document {
    let mut properties = settings(&IN_JOBS);
    properties.extend(doc! {
        "_id": { "bsonType": "objectId", "description": "an ObjectId" },
        "locked": { "bsonType": "bool", "description": "false; only a worker sets it to true" },
        "done": optional("bool", "true or false"),
        "created_at": optional("date", "a date"),
        "group": { "bsonType": "string", "minLength": 1, "maxLength": 256, "description": "a text of 1 to 256 characters" },
        "priority": { "bsonType": ["int", "long"], "minimum": 0, "maximum": 9, "description": "an integer from 0 to 9" },
        "scheduled_at": { "bsonType": "date", "description": "a date from the year 1 to the year 9999" },
        "unique": key(),
        "unique_while_waiting": key(),
        "unique_after": key(),
        "unique_for_period": key(),
        "replaced": count(),
        "due_after": optional("date", "a date"),
        "expires_at": optional("date", "a date"),
        "attempts": count(),
        "interruptions": count(),
        "deaths": count(),
        "executions_dropped": count(),
        "workable": {
            "bsonType": "object",
            "description": "a document {class, parameters} or {class, items}, with at most 4 MiB",
            "required": ["class"],
            "properties": {
                "class": { "bsonType": "string", "minLength": 1, "maxLength": 256, "description": "a text of 1 to 256 characters" },
                "parameters": parameters(),
                "method": optional("string", "a text"),
                "items": items(),
            },
        },
        "item_outcomes": {
            "bsonType": ["array", "null"],
            "maxItems": i64::try_from(MOST_ITEMS).unwrap_or(i64::MAX),
            "items": { "bsonType": ["string", "object", "null"] },
            "description": "an array with one outcome for each item at most",
        },
        "once": optional("bool", "true or false"),
        "recovered_from": optional("objectId", "the id of a job"),
        "schedule": optional("object", "the run of a schedule: {name, slot}"),
        "cancel_requested_at": optional("date", "a date"),
        "why": optional("string", "a text"),
        "last_execution": execution(),
        "executions": { "bsonType": ["array", "null"], "items": execution(), "description": "an array of executions" },
    });
    properties.extend(doc! {
        "graph": optional("objectId", "the id of a graph"),
        "waiting": { "enum": [true, Bson::Null], "description": "true while it waits for other jobs" },
        "waits_for": edges(),
        "followed": optional("bool", "true or false"),
        "continued_as": { "enum": [Bson::Null], "description": "only in the archive" },
    });
    properties
}

/// The settings of a job, by their names and types.
fn settings(every: &Document) -> Document {
    let rule = |(field, value): (&String, &Bson)| {
        let rule = match (field.as_str(), value.element_type()) {
            ("group" | "gate", _) => {
                doc! { "bsonType": ["string", "null"], "minLength": 1, "maxLength": 256, "description": "a text of 1 to 256 characters" }
            }
            ("priority", _) => {
                doc! { "bsonType": ["int", "long", "null"], "minimum": 0, "maximum": 9, "description": "an integer from 0 to 9" }
            }
            ("keep", _) => doc! { "enum": ["all", "failures", Bson::Null], "description": "`failures` or `all`" },
            ("retry_policy", _) => retry_policy(),
            (_, ElementType::Array) => {
                doc! { "bsonType": ["array", "null"], "items": { "bsonType": "string" }, "description": "an array of texts" }
            }
            (_, ElementType::Boolean) => optional("bool", "true or false"),
            (_, _) => optional("string", "a text"),
        };
        (field.clone(), rule.into())
    };
    every.iter().map(rule).collect()
}

/// The fields of a limit, of a resource or of a group.
fn limit() -> Document {
    let whole =
        |most: i64, description: &str| doc! { "bsonType": ["int", "long"], "minimum": 1, "maximum": most, "description": description };
    doc! {
        "capacity": {
            "bsonType": ["int", "long", "null"],
            "minimum": 1,
            "maximum": i64::from(LARGEST_CAPACITY),
            "description": "an integer from 1 to 100000",
        },
        "rate": {
            "bsonType": ["object", "null"],
            "description": "a document {starts, per_ms, burst}",
            "required": ["starts", "per_ms"],
            "properties": {
                "starts": whole(1_000_000, "an integer from 1 to 1000000"),
                "per_ms": whole(30 * 86_400_000, "an integer from 1 to the milliseconds of 30 days"),
                "burst": whole(1_000_000, "an integer from 1 to 1000000"),
            },
        },
    }
}

fn most_waiting() -> Document {
    doc! { "bsonType": ["int", "long", "null"], "minimum": 1, "description": "an integer from 1" }
}

pub(crate) fn limits_validator() -> Document {
    let name = doc! {
        "bsonType": "string",
        "minLength": 1,
        "maxLength": 248,
        "pattern": "^[^@,#*][^,#*]*\\*?$",
        "description": "the name of a resource, or a prefix that ends in `*`",
    };
    let mut properties = doc! { "_id": name, "most_waiting": most_waiting() };
    properties.extend(limit());
    doc! { "$jsonSchema": { "required": ["_id"], "properties": properties } }
}

pub(crate) fn groups_validator() -> Document {
    let mut properties = doc! {
        "_id": { "bsonType": "string", "minLength": 1, "maxLength": 256, "description": "the name of a group" },
        "weight": { "bsonType": ["int", "long", "double", "null"], "minimum": 0.001, "maximum": 1_000_000.0, "description": "a number from 0.001 to 1000000" },
        "ageing_ms": { "bsonType": ["int", "long", "null"], "minimum": 10, "maximum": 366_i64 * 86_400_000, "description": "an integer from 10 to the milliseconds of 366 days" },
        "maintenance": { "bsonType": ["array", "null"], "maxItems": i64::try_from(MOST_WINDOWS).unwrap_or(i64::MAX), "items": window(), "description": "an array of documents {from, until, zone, days}" },
        "most_waiting": most_waiting(),
    };
    properties.extend(limit());
    doc! { "$jsonSchema": { "required": ["_id"], "properties": properties } }
}

/// A maintenance window. The recruiter checks the zone.
fn window() -> Document {
    let time = doc! { "bsonType": "string", "pattern": "^[0-2][0-9]:[0-5][0-9](:[0-5][0-9])?$", "description": "a time of the day, such as 02:00" };
    let day = doc! { "enum": ["mon", "tue", "wed", "thu", "fri", "sat", "sun"] };
    doc! {
        "bsonType": "object",
        "required": ["from", "until"],
        "properties": {
            "from": time.clone(),
            "until": time,
            "zone": optional("string", "the IANA name of a zone"),
            "days": { "bsonType": ["array", "null"], "items": day, "description": "an array of the names of days, such as mon" },
        },
    }
}

pub(crate) fn pauses_validator() -> Document {
    doc! { "$jsonSchema": { "required": ["_id"], "properties": {
        "_id": { "bsonType": "string", "pattern": "(?s)^(everything|group:.+|class:.+|line:.+)$", "description": "`everything`, `group:NAME`, `class:NAME` or `line:KEY`" },
        "by": optional("string", "a text"),
        "reason": optional("string", "a text"),
        "at": optional("date", "a date"),
        "job": optional("objectId", "the id of a job"),
    } } }
}

/// Refuses an envelope that no subscriber could read. What is no message is skipped by them.
pub(crate) fn messages_validator() -> Document {
    doc! {
        "$jsonSchema": { "properties": {
            "_id": { "description": "leave it to the driver; at most 4 KiB" },
            "messages": { "description": "an array of documents {topic, body}" },
        } },
        "$expr": { "$lte": [{ "$bsonSize": { "_id": "$_id" } }, LARGEST_KEY] },
    }
}

/// The contract for people who write schedules by hand. It refuses wrong types and missing fields. Expressions, zones and policies are checked
/// by the library at a declaration, and by the recruiter when it reads the document.
pub(crate) fn schedulers_validator() -> Document {
    let name = |description: &str| doc! { "bsonType": "string", "minLength": 1, "maxLength": 256, "description": description };
    let milliseconds = |least: i64| {
        doc! { "bsonType": ["int", "long", "null"], "minimum": least, "maximum": 31_536_000_000_000_i64, "description": format!("milliseconds, an integer from {least}") }
    };
    let mut template = settings(&IN_TEMPLATES);
    template.extend(doc! { "class": name("a text of 1 to 256 characters"), "parameters": parameters(), "items": items() });
    let run = doc! {
        "bsonType": "object",
        "required": ["job", "at"],
        "properties": {
            "slot": optional("date", "a date"),
            "job": { "bsonType": "objectId", "description": "the id of a job" },
            "at": { "bsonType": "date", "description": "a date" },
            "manual": optional("bool", "true or false"),
        },
    };
    doc! {
        "$jsonSchema": {
            "required": ["_id", "job"],
            "properties": {
                "_id": name("the name of the schedule: a text of 1 to 256 characters"),
                "cron": { "bsonType": ["string", "null"], "maxLength": 256, "pattern": r"^\s*(@[A-Za-z]+|\S+(\s+\S+){4,5})\s*$", "description": "a cron expression of 5 or 6 fields" },
                "zone": optional("string", "the IANA name of a zone"),
                "every_ms": milliseconds(1_000),
                "jitter_ms": milliseconds(0),
                "overlap": { "enum": ["allow", "skip", Bson::Null], "description": "`allow` or `skip`" },
                "missed": { "enum": ["skip", "one", "all", Bson::Null], "description": "`skip`, `one` or `all`" },
                "missed_limit": { "bsonType": ["int", "long", "null"], "minimum": 1, "maximum": i64::from(MOST_MISSED), "description": "an integer from 1 to 1000" },
                "job": {
                    "bsonType": "object",
                    "description": "what each run enqueues: {class, parameters} or {class, items}, and the settings of a job, with at most 4 MiB",
                    "required": ["class"],
                    "properties": template,
                },
                "source": { "bsonType": ["string", "null"], "minLength": 1, "maxLength": 256, "description": "a text of 1 to 256 characters" },
                "paused": {
                    "bsonType": ["object", "null"],
                    "description": "a document {by, reason, at}",
                    "properties": { "by": optional("string", "a text"), "reason": optional("string", "a text"), "at": optional("date", "a date") },
                },
                "created_at": optional("date", "a date"),
                "last_slot": optional("date", "a date"),
                "next_run": optional("date", "a date"),
                "runs": { "bsonType": ["array", "null"], "items": run, "description": "an array of runs" },
                "skipped": optional("object", "counts of slots without a run"),
                "revision": { "bsonType": ["int", "long", "null"], "description": "an integer" },
            },
            // Exactly one of them.
            "oneOf": [
                { "required": ["cron"], "properties": { "cron": { "bsonType": "string" }, "every_ms": { "bsonType": "null" } } },
                { "required": ["every_ms"], "properties": { "every_ms": { "bsonType": ["int", "long"] }, "cron": { "bsonType": "null" } } },
            ],
        },
        "$expr": { "$or": [
            { "$ne": [{ "$type": "$job" }, "object"] },
            { "$lte": [{ "$bsonSize": "$job" }, i64::try_from(LARGEST_WORKABLE).unwrap_or(i64::MAX)] },
        ] },
    }
}

/// A unique key. A key that is made of parameters is the class with a text or a hash.
fn key() -> Document {
    doc! { "bsonType": ["string", "null"], "minLength": 1, "maxLength": 512, "description": "a text of 1 to 512 characters" }
}

fn optional(of: &str, description: &str) -> Document {
    doc! { "bsonType": [of, "null"], "description": description }
}

/// A document, or an empty array, because PHP stores an empty document as one.
fn parameters() -> Document {
    doc! { "bsonType": ["object", "array", "null"], "maxItems": 0, "description": "a document" }
}

fn items() -> Document {
    doc! {
        "bsonType": ["array", "null"],
        "minItems": 1,
        "maxItems": i64::try_from(MOST_ITEMS).unwrap_or(i64::MAX),
        "items": parameters(),
        "description": "an array of 1 to 1000 documents",
    }
}

fn retry_policy() -> Document {
    doc! {
        "bsonType": ["object", "null"],
        "description": "a document {class, parameters}",
        "required": ["class"],
        "properties": {
            "class": { "bsonType": "string", "description": "the name of a retry policy" },
            "parameters": parameters(),
        },
    }
}

fn edges() -> Document {
    let edge = doc! {
        "bsonType": ["objectId", "object"],
        "required": ["job"],
        "properties": {
            "job": { "bsonType": "objectId", "description": "the id of a job" },
            "when": { "enum": ["done", "ended", "failed"], "description": "`done`, `ended` or `failed`" },
        },
    };
    doc! { "bsonType": ["array", "null"], "items": edge, "description": "an array of ids of jobs, or of documents {job, when}" }
}

fn count() -> Document {
    doc! { "bsonType": ["int", "long", "null"], "minimum": 0, "maximum": i32::MAX, "description": "an integer from 0" }
}

fn execution() -> Document {
    doc! {
        "bsonType": ["object", "null"],
        "description": "what a worker has written of an execution",
        "properties": {
            "scheduled_at": optional("date", "a date"),
            "started_at": optional("date", "a date"),
            "ended_at": optional("date", "a date"),
            "worker": optional("objectId", "the id of a worker"),
            "start": optional("objectId", "the id of a start"),
            "if_worker_dies": optional("object", "{retry_after_ms} or {archive}"),
            "hostname": optional("string", "a text"),
            "pid": { "bsonType": ["int", "long", "null"], "description": "an integer" },
            "class": optional("string", "a text"),
            "message": optional("string", "a text"),
            "trace": optional("string", "a text"),
            "crashed": optional("bool", "true or false"),
        },
    }
}
