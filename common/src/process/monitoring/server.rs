//! What is answered about metrics and probes.

use std::{convert::Infallible, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{ALLOW, CONTENT_TYPE, HeaderValue},
    service::service_fn,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::process::http::{Bounds, serve};

/// The smallest head that hyper has.
const BOUNDS: Bounds = Bounds {
    connections: 16,
    head_within: Duration::from_secs(3),
    head_bytes: 8_192,
    one_request_within: Some(Duration::from_secs(10)),
    read_within: Duration::from_secs(10),
};

/// Whether a probe succeeds, in words.
pub(super) type Answer = Result<String, String>;

/// What is served.
pub(super) trait Pages: Send + Sync + 'static {
    /// In the text format of Prometheus.
    fn metrics(&self) -> String;
    fn live(&self) -> Answer;
    fn ready(&self) -> Answer;
}

/// Serves until it is dropped.
pub(super) async fn run(listener: TcpListener, pages: impl Pages) {
    let pages = Arc::new(pages);
    let answers = service_fn(move |request: Request<Incoming>| {
        let answer = answer(request.method(), request.uri().path(), pages.as_ref());
        async move { Ok::<_, Infallible>(answer) }
    });
    serve(listener, BOUNDS, answers, CancellationToken::new()).await;
}

fn answer(method: &Method, path: &str, pages: &impl Pages) -> Response<Full<Bytes>> {
    if !matches!(*method, Method::GET | Method::HEAD) {
        let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are answered");
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let probe = |answer: Answer| match answer {
        Ok(said) => text(StatusCode::OK, &said),
        Err(said) => text(StatusCode::SERVICE_UNAVAILABLE, &said),
    };
    match path {
        "/metrics" => page(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", pages.metrics()),
        "/livez" => probe(pages.live()),
        "/readyz" => probe(pages.ready()),
        _ => text(StatusCode::NOT_FOUND, "there are /metrics, /livez and /readyz"),
    }
}

fn text(status: StatusCode, said: &str) -> Response<Full<Bytes>> {
    page(status, "text/plain; charset=utf-8", format!("{said}\n"))
}

fn page(status: StatusCode, content: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Test;

    impl Pages for Test {
        fn metrics(&self) -> String {
            "a_metric 1\n".into()
        }

        fn live(&self) -> Answer {
            Ok("alive".into())
        }

        fn ready(&self) -> Answer {
            Err("starting".into())
        }
    }

    #[test]
    fn each_path_has_its_answer() {
        let check = |method: Method, path: &str| answer(&method, path, &Test).status().as_u16();
        assert_eq!(["/metrics", "/livez", "/readyz", "/", "/metrics/"].map(|path| check(Method::GET, path)), [200, 200, 503, 404, 404]);
        assert_eq!(
            [Method::HEAD, Method::POST, Method::DELETE, Method::OPTIONS].map(|method| check(method, "/metrics")),
            [200, 405, 405, 405]
        );
        assert_eq!(answer(&Method::POST, "/metrics", &Test).headers()[ALLOW], "GET, HEAD");
        let content = |path| answer(&Method::GET, path, &Test).headers()[CONTENT_TYPE].clone();
        assert_eq!(content("/metrics"), "text/plain; version=0.0.4; charset=utf-8");
        assert_eq!(content("/livez"), "text/plain; charset=utf-8");
    }
}
