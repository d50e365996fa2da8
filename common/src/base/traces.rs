//! The trace of a job: between the OpenTelemetry context and the field `traceparent`. With the feature `opentelemetry`.
//!
//! A job carries a W3C `traceparent`, also if the application has set another propagator. It carries neither `tracestate` nor baggage.

use opentelemetry::{
    Context,
    trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState},
};

use super::check_traceparent;

/// The `traceparent` of the current OpenTelemetry context. `None` if it has no valid span.
///
/// With `tracing-opentelemetry`, this is the current `tracing` span, unless the application has switched context activation off.
pub fn current() -> Option<String> {
    Context::map_current(|context| {
        let span = context.span();
        let span = span.span_context();
        let sampled = span.trace_flags() & TraceFlags::SAMPLED;
        span.is_valid().then(|| format!("00-{:032x}-{:016x}-{sampled:02x}", span.trace_id(), span.span_id()))
    })
}

/// An OpenTelemetry context with the remote span that a `traceparent` names. `None` if the text names no valid span.
pub fn remote(traceparent: &str) -> Option<Context> {
    check_traceparent(traceparent).ok()?;
    let mut parts = traceparent.split('-');
    let version = parts.next()?;
    let (trace, span) = (TraceId::from_hex(parts.next()?).ok()?, SpanId::from_hex(parts.next()?).ok()?);
    let flags = TraceFlags::new(u8::from_str_radix(parts.next()?, 16).ok()?) & TraceFlags::SAMPLED;
    let span = SpanContext::new(trace, span, flags, true, TraceState::NONE);
    // The W3C forbids the version ff.
    (version != "ff" && span.is_valid()).then(|| Context::new().with_remote_span_context(span))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_and_a_context_are_the_same() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        for text in [good.to_owned(), good.replace("-01", "-00")] {
            let _attached = remote(&text).expect("a span").attach();
            assert_eq!(current(), Some(text));
        }
        assert_eq!(current(), None);
        let later = remote(&format!("01{}-more", good.replace("-01", "-ff").trim_start_matches("00"))).expect("a span");
        assert!(later.span().span_context().is_remote() && later.span().span_context().is_sampled());
    }

    #[test]
    fn a_text_that_names_no_span_is_no_parent() {
        let (trace, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        let none = |digits: usize| "0".repeat(digits);
        for text in [
            String::new(),
            "no trace".into(),
            format!("00-{trace}"),
            format!("00-{}-{span}-01", none(32)),
            format!("00-{trace}-{}-01", none(16)),
            format!("ff-{trace}-{span}-01"),
        ] {
            assert!(remote(&text).is_none(), "{text}");
        }
    }
}
